"""Training: the schedule, the loss mask, and that a few steps learn and repeat exactly."""

import itertools

import pytest
import torch

from trserve.demo import PAIR_DIR
from trserve.demo.data import BATCH, IGNORED, Batch, TrainingStream
from trserve.demo.modeling import RECIPES, build_model
from trserve.demo.optim import WARMUP_STEPS, MuonAdamW, learning_rate_share
from trserve.demo.tokenizer_build import MAX_CONTEXT, PAD_ID, build_tokenizer, load_tokenizer
from trserve.demo.train import labelled_logits, main

TOKENIZER = load_tokenizer(PAIR_DIR / "tiny")


def tiny(seed=0):
    return build_model(RECIPES["tiny"], TOKENIZER.get_vocab_size(), seed)


def run(steps, seed=0):
    torch.set_num_threads(1)
    model, losses = tiny(seed), []
    optimiser = MuonAdamW(model, 100, decay=0.35)
    stream = TrainingStream(TOKENIZER, seed, drill=0.3)
    for step, batch in zip(range(steps), stream, strict=False):
        logits, targets = labelled_logits(model, batch)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        loss.backward()
        optimiser.step(step)
        losses.append(loss.item())
    return losses


def test_a_few_steps_learn_and_repeat_bit_by_bit():
    first = run(12)
    assert first[-1] < first[0] - 1.0
    assert run(4) == first[:4]


def test_schedule_warms_up_holds_and_decays():
    shares = [learning_rate_share(step, 1000, 0.35) for step in range(1000)]
    assert shares[0] == pytest.approx(1 / WARMUP_STEPS)
    assert shares[WARMUP_STEPS:650] == [1.0] * (650 - WARMUP_STEPS)
    assert shares[825] == pytest.approx(0.5, abs=0.01)
    assert shares[-1] == pytest.approx(0.01)
    assert shares[650:] == sorted(shares[650:], reverse=True)


def test_batches_fit_the_context_and_pad_without_loss():
    stream = TrainingStream(TOKENIZER, 3, drill=0.2)
    for batch in itertools.islice(stream, 24):
        assert batch.ids.shape == batch.labels.shape == batch.positions.shape
        assert len(batch.ids) == BATCH
        real = batch.ids != PAD_ID
        assert int(batch.positions[real].max()) < MAX_CONTEXT
        assert (batch.labels[~real] == IGNORED).all()
        learnt = batch.labels != IGNORED
        assert (batch.labels[learnt] == batch.ids[learnt]).all()
        assert learnt.any(1).all()


def test_skipped_positions_do_not_cut_the_attention():
    """A gap is distance, not a border: what stands before it still reaches what comes after."""
    model = tiny().eval()
    ids = torch.randint(3, 500, (1, 30))
    positions = torch.arange(30)[None].clone()
    positions[:, 15:] += 200
    labels = torch.full_like(ids, IGNORED)
    labels[:, -1] = ids[:, -1]
    with torch.no_grad():
        before, _ = labelled_logits(model, Batch(ids, labels, positions))
        changed = ids.clone()
        changed[:, 2] = (ids[:, 2] - 3 + 1) % 497 + 3
        after, _ = labelled_logits(model, Batch(changed, labels, positions))
        plain, _ = labelled_logits(model, Batch(ids, labels, torch.arange(30)[None]))
    assert not torch.equal(before, after)
    assert not torch.allclose(before, plain, atol=1e-3)


@pytest.mark.slow
def test_the_committed_tokenizer_is_the_one_that_the_seed_gives():
    committed = (PAIR_DIR / "tiny" / "tokenizer.json").read_text()
    assert build_tokenizer(0).to_str(pretty=True) == committed


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as failure:
        main(["--which", "middle"])
    assert failure.value.code == 2
    assert "--which" in capsys.readouterr().err

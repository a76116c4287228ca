"""Two small tasks for lm-eval, and its log likelihoods held against transformers' own.

The tasks' data is made here, since the harness's come from a hub. Knows the harness's command line
and files; no server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients_heavy.places import PythonPlace

NUM_SUMS = 6
NUM_CHOICES = 12
TOLERANCE = 1e-3
_TIES = 1e-4
"""Where two tokens are this near, either may be called the greedy one."""

_CHOICES = """\
task: mini_mc
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/mini_mc.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
"""
_SUMS = """\
task: mini_gsm
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/mini_gsm.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 60, temperature: 0}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list: [{metric: exact_match}]
"""


def write(folder: Path) -> None:
    """The tasks and their data."""
    pairs = [(7 * n % 50 + 2, 11 * n % 30 + 3) for n in range(NUM_CHOICES)]
    choices = [
        {
            "question": f"{a} + {b} =",
            "choices": [f" {a + b}", f" {a + b + 1}", " pencils"],
            "gold": 0,
        }
        for a, b in pairs
    ]
    sums = [{"question": f"What is {a} + {b}?", "answer": f"{a + b}"} for a, b in pairs[:NUM_SUMS]]
    for name, text, rows in ("mini_mc", _CHOICES, choices), ("mini_gsm", _SUMS, sums):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run(
    place: PythonPlace, task: str, kind: str, options: list[str], **model_args: Any
) -> dict[str, Any]:
    """The scores of one run."""
    place.clear()
    write(place.work)
    arguments = ",".join(f"{name}={value}" for name, value in model_args.items())
    place.run(
        [
            *(place.program("lm-eval"), "run", "--model", kind, "--tasks", task),
            *("--include_path", place.work, "--model_args", arguments, "--output_path", "out"),
            *options,
        ],
        {"HF_HUB_OFFLINE": "1"},
    )
    (results,) = (place.work / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"][task]
    return found


def compare(place: PythonPlace, checkpoint: Path) -> float:
    """How far the last run's log likelihoods are at most from transformers' of ``checkpoint``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (samples,) = (place.work / "out").rglob("samples_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    farthest, count = 0.0, 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        pairs = zip(sample["arguments"].values(), sample["filtered_resps"], strict=True)
        for arguments, (told, greedy) in pairs:
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
            start = len(tokenizer(context, add_special_tokens=False).input_ids)
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            rows = logprobs[start - 1 : len(whole) - 1]
            chosen = rows[range(len(rows)), whole[start:]]
            farthest = max(farthest, abs(float(chosen.sum()) - float(told)))
            behind = float((rows.max(-1).values - chosen).max())
            assert (greedy == "True") == (behind == 0.0) or behind < _TIES, arguments
            count += 1
    assert count == 3 * NUM_CHOICES
    return farthest

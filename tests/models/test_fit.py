"""Whether weights fit, and what is said where they do not."""

import pytest

from trserve.errors import ModelUnavailableError
from trserve.models.aliases import alias_spec
from trserve.models.fit import check_weights_fit


def test_the_numbers_are_named():
    models = [("0.6b", alias_spec("0.6b"), 2, False), ("32b", alias_spec("32b"), 2, False)]
    with pytest.raises(ModelUnavailableError) as info:
        check_weights_fit(models, 16 * 2**30)
    problem, advice = str(info.value).splitlines()
    assert problem.startswith("the weights need 63.9 GiB of memory, but 16.0 GiB are free: ")
    assert "32b 62.5 GiB (32.76 billion weights of 2 bytes)" in problem
    assert advice == "name smaller models, use --quantization int8, or free memory"


def test_bfloat16_is_an_advice_only_where_it_helps():
    with pytest.raises(ModelUnavailableError, match=r"4\.2 GiB[\s\S]*use --dtype bfloat16"):
        check_weights_fit(
            [("a", alias_spec("0.6b"), 4, False), ("b", alias_spec("0.6b"), 2, False)], 2**30
        )


def test_models_must_fit_together():
    one = [("0.6b", alias_spec("0.6b"), 2, False)]
    check_weights_fit(one, 2 * 2**30)
    with pytest.raises(ModelUnavailableError, match=r"need 2\.8 GiB"):
        check_weights_fit(one * 2, 2 * 2**30)


def test_eight_bits_are_an_advice_until_they_are_taken():
    models = [("32b", alias_spec("32b"), 2, True)]
    with pytest.raises(ModelUnavailableError) as info:
        check_weights_fit(models, 16 * 2**30)
    problem, advice = str(info.value).splitlines()
    assert "the weights need 32.0 GiB" in problem
    assert "weights of 1 bytes" in problem
    assert advice == "name smaller models, or free memory"

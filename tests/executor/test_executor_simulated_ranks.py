"""The benchmark of single ranks' shares measures what it says, on narrow models and without a GPU."""

import pytest

from tests.executor.gpu_simulated_ranks import OUTPUT, Case, main


def test_cases_are_read_from_the_command_line() -> None:
    assert Case.parse("llama-3.1-70b:4", False) == Case("llama-3.1-70b:4", "llama-3.1-70b", 4, None, False)
    assert Case.parse("deepseek-v3:8:16", False).layers == 16
    assert Case.parse("protocol", True).ranks == 1


@pytest.mark.slow
def test_a_share_is_measured_beside_what_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    few, many, ranks = main(
        ["--tiny", "--rows", "4", "--limit", "300", "llama-3.1-8b:4", "deepseek-v3:2:5", "protocol"]
    )
    assert few["layers"] == 4 and many["layers"] == 5
    for found in (few, many):
        assert 0 < found["steps"] < OUTPUT and found["device, ms"] > 0 and found["host, ms"] > 0
        assert found["each step, ms"] > 0 and found["modelled exchanges, ms"] > 0
    assert few["KV, KiB a token"] == 4 * 2 * 2 * 4 * 4 / 2**10  # layers, keys and values, heads, width, bytes
    assert len(ranks["all"]["W1"]["ranks"]) == 8 and ranks["W3 plain, us a step"] > 0
    assert "| deepseek-v3:2:5 | 5 |" in capsys.readouterr().out

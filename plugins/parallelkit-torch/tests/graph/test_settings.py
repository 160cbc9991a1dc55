"""Options of graph mode: CUDA graphs in torch's words, contradictions by name."""

from __future__ import annotations

from typing import Any

import pytest
from parallelkit_torch.graph.settings import settle

from parallelkit.errors import ExecutionModeError, UnsupportedFeatureError

CUDA_GRAPHS = "triton.cudagraphs"


@pytest.mark.parametrize(
    ("given", "compiled"),
    [
        ({}, {}),
        ({"cuda_graphs": None}, {}),
        ({"cuda_graphs": False}, {}),
        ({"cuda_graphs": True}, {"mode": "reduce-overhead"}),
        ({"cuda_graphs": True, "mode": "max-autotune"}, {"mode": "max-autotune"}),
        (
            {"cuda_graphs": True, "options": {"max_autotune": True}},
            {"options": {"max_autotune": True, CUDA_GRAPHS: True}},
        ),
        ({"cuda_graphs": True, "backend": "cudagraphs"}, {"backend": "cudagraphs"}),
        (
            {"cuda_graphs": True, "backend": "inductor", "fullgraph": True},
            {"backend": "inductor", "fullgraph": True, "mode": "reduce-overhead"},
        ),
    ],
)
def test_cuda_graphs_in_the_words_of_torch(given: dict[str, Any], compiled: dict[str, Any]) -> None:
    settings = settle(given)
    assert settings.options == compiled
    assert settings.cuda_graphs is (given.get("cuda_graphs") is True)
    without = {k: v for k, v in given.items() if k != "cuda_graphs"}
    assert settings.without == without


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cuda_graphs": True, "mode": "default"}, "contradicts mode='default'"),
        ({"cuda_graphs": True, "mode": "max-autotune-no-cudagraphs"}, "contradicts mode="),
        ({"cuda_graphs": True, "options": {CUDA_GRAPHS: False}}, "contradicts options="),
        ({"cuda_graphs": True, "backend": "aot_eager"}, "contradicts backend='aot_eager'"),
        ({"cuda_graphs": True, "backend": print}, "contradicts backend="),
        ({"cuda_graphs": False, "mode": "reduce-overhead"}, "contradicts mode='reduce-overhead'"),
        ({"cuda_graphs": False, "options": {CUDA_GRAPHS: True}}, "contradicts options="),
        ({"cuda_graphs": False, "backend": "cudagraphs"}, "contradicts backend='cudagraphs'"),
        ({"mode": "default", "options": {"max_autotune": True}}, "exclude each other"),
        ({"mode": "fast"}, "inductor has default, .*reduce-overhead"),
        ({"options": {"max_autotun": True}}, "no option 'max_autotun'; near are max_autotune"),
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes'"),
        ({"dynamic": 1.5}, "dynamic is 1.5"),
        ({"fullgraph": None}, "fullgraph is None"),
        ({"backend": "nothing"}, "no backend 'nothing'; it has .*inductor"),
        ({"regions": "layers"}, "regions is 'layers'; it is 'auto', 'whole', 'blocks' or"),
        ({"regions": []}, r"regions is \[\]"),
        ({"regions": 3}, "regions is 3"),
    ],
)
def test_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecutionModeError, match=said):
        settle(given)


@pytest.mark.parametrize("name", ["disable", "model", "fulgraph"])
def test_no_such_option(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"no option '{name}'"):
        settle({name: True})


def test_regions_and_backend() -> None:
    assert settle({"regions": ["a.*", "b"]}).regions == ("a.*", "b")
    assert settle({"regions": "blocks"}).regions == "blocks"
    assert settle({}).backend == "inductor"
    assert settle({"backend": print}).backend == "print"
    assert settle({"options": {"max-autotune": True}}).options  # torch takes dashes, too


def test_options_given_stay_as_they_are() -> None:
    details: dict[str, Any] = {"max_autotune": True}
    settle({"cuda_graphs": True, "options": details})
    assert details == {"max_autotune": True}

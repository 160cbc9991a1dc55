"""Torch modules as publisher and follower, in one process."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import parallelkit as pk


def models() -> tuple[nn.Module, nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(
            nn.Embedding(11, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 11)
        )
        model[3].weight = model[0].weight  # a tied head
        return model.to(torch.bfloat16)

    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    return source, make()


@pytest.mark.parametrize("aliased", [False, True])
def test_a_compiled_follower_keeps_its_addresses_and_gives_the_new_output(aliased):
    source, target = models()
    source.eval()
    target.eval()
    compiled = torch.compile(target, backend="aot_eager")
    ids = torch.arange(11)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.01)
    with torch.no_grad():
        stale = compiled(ids)
    before = {name: t.data_ptr() for name, t in target.state_dict().items()}
    with pk.publish_weights(source, timeout=10, aliased=aliased) as publisher:
        with pk.subscribe_weights(compiled, publisher.ticket) as follower:
            for version in (1, 2):
                loss = source(ids).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                thread = threading.Thread(target=follower.step, args=(10,))
                thread.start()
                publisher.update()
                thread.join()
                with torch.no_grad(), follower.use() as model:
                    assert model is compiled
                    torch.testing.assert_close(model(ids), source(ids), rtol=0, atol=0)
                assert follower.version == version
    assert {name: t.data_ptr() for name, t in target.state_dict().items()} == before
    assert target[3].weight is target[0].weight
    assert not torch.equal(stale, source(ids))
    with torch.no_grad():
        source[1].weight.zero_()  # the trainer's model works on after close
    assert source(ids).isfinite().all()


def test_a_model_with_a_tied_head_does_not_follow_one_without():
    source, target = models()
    target[3].weight = nn.Parameter(target[3].weight.detach().clone())
    with pk.publish_weights(source) as publisher:
        with pytest.raises(pk.ParallelKitError, match="publisher ties"):
            pk.subscribe_weights(target, publisher.ticket)


def test_writing_live_weights_is_seen_by_autograd():
    source, target = models()
    with pk.publish_weights(source, timeout=10) as publisher:
        with pk.subscribe_weights(target, publisher.ticket) as follower:
            out = target[1](torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)).sum()
            thread = threading.Thread(target=follower.step, args=(10,))
            thread.start()
            publisher.update()
            thread.join()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()

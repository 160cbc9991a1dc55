"""Which transports are opened, and by which one each member reaches each rank."""

from __future__ import annotations

import socket

import attrs
import pytest

from parallelkit import loader
from parallelkit.errors import TransportError
from parallelkit.plugin import API_VERSION, hookimpl
from parallelkit.specs import Accelerator, HostIdentity, TransportCandidate
from parallelkit.testing.peer import sample_model, values
from parallelkit.weights import joining, passes, publish_weights, subscribe_weights
from parallelkit.weights.identity import host_identity
from parallelkit.weights.routes import Post, Routes, describe

HERE = HostIdentity(boot_id="a", uid=1000, pid=7, net_namespace=2)
BOTH = {"shm": b"s", "tcp": b"t"}


def there(**fields):
    return attrs.evolve(HERE, pid=8, **fields)


def routes(wanted="auto", host="10.0.0.5", device="cpu", posts=((0, HERE, BOTH),)):
    made = Routes(wanted, device, HERE, host)
    made.posts = {rank: Post(rank, where, 256, offers) for rank, where, offers in posts}
    return made


def chosen(made, peer):
    return [(source.rank, source.transport) for source in made.way(peer).sources]


@pytest.mark.parametrize(
    ("wanted", "host", "names"),
    [
        ("auto", "127.0.0.1", ["shm"]),
        ("auto", "127.0.0.9", ["shm"]),
        ("auto", "[::1]", ["shm"]),
        ("auto", "10.0.0.5", ["shm", "tcp"]),
        ("auto", "[fd00::5]", ["shm", "tcp"]),
        ("shm", "10.0.0.5", ["shm"]),
        ("tcp", "10.0.0.5", ["tcp"]),
        ("tcp", "127.0.0.1", ["tcp"]),
    ],
)
def test_what_is_opened(wanted, host, names):
    assert routes(wanted, host).names() == names


def test_each_member_has_the_cheapest_that_reaches_it():
    made = routes()
    assert chosen(made, there()) == [(0, "shm")]
    assert chosen(made, there(boot_id="b")) == [(0, "tcp")]
    assert chosen(made, there(uid=1001)) == [(0, "tcp")]
    assert chosen(made, there(net_namespace=3)) == [(0, "tcp")]


def test_ranks_on_several_hosts_are_reached_each_in_its_way():
    other = attrs.evolve(HERE, boot_id="b")
    made = routes(posts=((0, HERE, BOTH), (1, HERE, BOTH), (4, other, BOTH)))
    assert chosen(made, there()) == [(0, "shm"), (1, "shm"), (4, "tcp")]
    assert chosen(made, there(boot_id="b")) == [(0, "tcp"), (1, "tcp"), (4, "shm")]
    assert chosen(made, there(boot_id="c")) == [(0, "tcp"), (1, "tcp"), (4, "tcp")]


def test_a_transport_that_a_rank_has_not_is_not_chosen():
    made = routes(posts=((0, HERE, {"tcp": b"t"}),))
    assert chosen(made, there()) == [(0, "tcp")]


def test_one_that_nothing_reaches_is_told_why():
    made = routes("shm", posts=((0, HERE, {"shm": b"s"}),))
    with pytest.raises(TransportError, match="rank 0 .*shm: the two ends are on different hosts"):
        made.way(there(boot_id="b"))
    made = routes(host="127.0.0.1")
    with pytest.raises(TransportError, match="different hosts.*tcp: listens on loopback"):
        made.way(there(boot_id="b"))


def test_every_source_has_a_pass_of_its_own_for_its_rank():
    made = routes(posts=((0, HERE, BOTH), (3, HERE, BOTH)))
    first, second = made.way(there()).sources, made.way(there()).sources
    assert len({source.key for source in [*first, *second]}) == 4
    for source in first:
        assert passes.Passes(made.secret, source.rank).redeem(source.key)
        assert not passes.Passes(made.secret, source.rank + 1).redeem(source.key)
        assert (source.nbytes, source.offer) == (256, b"s")


def test_a_transport_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(TransportError, match=r"'pigeon' is not to be had here; there are: shm \("):
        routes("pigeon")


def test_explain_says_what_else_is_open_and_what_is_not():
    text = "\n".join(routes().explain())
    assert text.startswith("transport shm: same host and user")
    assert "for other members: tcp: listens on 10.0.0.5" in text
    assert "  not tcp: listens on loopback" in "\n".join(routes(host="127.0.0.1").explain())
    assert "  not shm: transport='tcp' was asked for" in routes("tcp").explain()


def test_posts_come_through_a_broadcast():
    gpu = Accelerator(device="GPU-1", reads=("GPU-1", "GPU-2"))
    here = attrs.evolve(HERE, accelerator=gpu)
    post = Post(3, here, 512, BOTH, {"tcp": False}, "no handle can be made of it")
    assert Post.from_plain(post.to_plain()) == post


def test_what_is_encrypted_is_what_every_rank_says():
    made = routes()
    first, second = ({"tcp": one} for one in (True, False))
    made.posts = {0: Post(0, HERE, 256, BOTH, first)}
    assert made.encrypted("tcp") is made.encrypted("shm+tcp") is True
    assert made.encrypted("shm") is made.encrypted("") is None
    made.posts[1] = Post(1, HERE, 256, BOTH, second)
    assert made.encrypted("tcp") is False


def test_transports_are_listed_once():
    assert describe(["shm", "shm+tcp", "", "tcp"]) == "shm, tcp"
    assert describe([]) == ""


# --- with a publisher --------------------------------------------------------------------------


def an_address():
    """An address of this host that is no loopback; asks the routing table, sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this host has no address besides loopback")
    return address


def test_a_member_elsewhere_comes_by_tcp_while_one_here_maps_the_arena(bench, monkeypatch):
    publisher = bench.publish(endpoint=f"{an_address()}:0")
    near = bench.follow()
    elsewhere = attrs.evolve(host_identity(), boot_id="another machine")
    monkeypatch.setattr(joining, "identity_of", lambda sink: elsewhere)
    far = bench.follow()
    monkeypatch.undo()
    report = bench.update()
    assert [m.transport for m in report.members] == ["shm", "tcp"]
    assert report.transport == "shm, tcp"
    assert [m.encrypted for m in report.members] == [None, True]
    assert values(near.model) == values(far.model) == {1.0}
    assert near.subscriber._placement.readers.mapped
    assert not far.subscriber._placement.readers.mapped
    assert "for other members: tcp" in publisher.explain()


@pytest.mark.parametrize(("encrypt", "said"), [(True, "encrypted"), (False, "in the clear")])
def test_a_report_says_what_a_network_could_see(bench, encrypt, said):
    bench.publish(transport="tcp", encrypt=encrypt)
    bench.follow()
    report = bench.update()
    assert report.members[0].encrypted is encrypt
    assert f"by tcp, {said}\n" in f"{report}\n"


def test_a_member_elsewhere_is_refused_where_only_memory_is_shared(bench, monkeypatch):
    publisher = bench.publish()
    elsewhere = attrs.evolve(host_identity(), boot_id="another machine")
    monkeypatch.setattr(joining, "identity_of", lambda sink: elsewhere)
    with pytest.raises(TransportError, match="shm: the two ends are on different hosts"):
        subscribe_weights(sample_model(), publisher.ticket, timeout=5.0)


@pytest.mark.parametrize("options", [{"named": 1}, {"encrypt": "no"}])
def test_options_are_true_or_false(bench, options):
    with pytest.raises(TransportError, match="it is True or False"):
        bench.publish(**options)


@pytest.fixture
def third_party():
    """A plugin whose transport reaches nothing here; it has options, told or not."""

    def plug(told):
        names = {"publish_options": ("level",), "subscribe_options": ("window",)} if told else {}

        class Plugin:
            parallelkit_api = API_VERSION

            @hookimpl
            def parallelkit_transports(self, request):
                return [TransportCandidate(name="x", reach=False, cost=1, reason="no", **names)]

        loader.register(Plugin(), "third party")

    yield plug
    loader.default_manager().unregister("third party")


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_options_of_another_transport_are_let_through(bench, third_party, transport):
    third_party(True)
    bench.publish(transport=transport, level=3, encrypt=True)
    bench.follow(window="wide", connections=1)
    assert bench.update().version == 1
    with pytest.raises(
        TransportError, match=r"publish_weights has no argument levle, .* level \(x\)"
    ):
        publish_weights(sample_model(), levle=3, level=3)
    with pytest.raises(TransportError, match=r"subscribe_weights has no argument level, .*window"):
        subscribe_weights(sample_model(), bench.publisher.new_ticket(), level=3)


def test_nothing_is_refused_as_long_as_a_plugin_does_not_tell_its_options(bench, third_party):
    third_party(False)
    bench.publish(level=3)
    bench.follow(window="wide")
    assert bench.update().version == 1


def test_an_option_that_no_transport_has_is_refused(bench):
    with pytest.raises(
        TransportError,
        match=r"publish_weights has no argument connections, .* named \(shm\), encrypt \(tcp\)",
    ):
        bench.publish(connections=2)


def test_tcp_in_the_clear_has_to_be_asked_for(bench):
    bench.publish(transport="tcp", encrypt=False)
    follower = bench.follow()
    bench.update()
    assert values(follower.model) == {1.0}

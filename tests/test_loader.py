"""Loading plugins: one that is broken costs nobody else anything, and is named."""

from __future__ import annotations

import random
import sys
import textwrap
import threading
import types
import warnings
from pathlib import Path

import attrs
import pytest

import parallelkit as pk
from parallelkit import discovery, hookspecs, loader
from parallelkit.errors import PluginError, PluginLoadError, PluginWarning
from parallelkit.loader import PluginManager
from parallelkit.plugin import hookimpl
from parallelkit.testing.fake import FakePlugin


def load(manager: PluginManager) -> dict[str, loader.PluginInfo]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return {p.name: p for p in manager.load().plugins}


class TestBrokenEntryPoints:
    @pytest.mark.parametrize(
        ("entry", "source", "reason"),
        [
            ("bad = pk_test_import_error", "import pk_test_not_there", "ModuleNotFoundError"),
            ("bad = pk_test_raises", "raise RuntimeError('boom')", "RuntimeError: boom"),
            ("bad = pk_test_no_such_module", "", "ModuleNotFoundError"),
            ("bad = pk_test_plain:missing", "", "AttributeError"),
            ("bad = pk_test_syntax", "def (:", "SyntaxError"),
            ("bad = pk_test_exits", "raise SystemExit(3)", "SystemExit: 3"),
        ],
    )
    def test_others_load_and_the_broken_one_is_listed(self, distributions, entry, source, reason):
        distributions.good("aaa-first", "first")
        module = entry.partition("= ")[2].partition(":")[0]
        modules = {} if "no_such" in module else {module: source}
        distributions.add("bbb-broken", entry, version="2.5", modules=modules)
        distributions.good("ccc-last", "last")
        manager = distributions.manager()

        with pytest.warns(PluginWarning, match=r"'bad' \(bbb-broken 2.5\) is left out"):
            found = {p.name: p for p in manager.load().plugins}

        assert found["first"].state == found["last"].state == "loaded"
        bad = found["bad"]
        assert (bad.state, bad.dist, bad.version) == ("failed", "bbb-broken", "2.5")
        assert reason in bad.reason
        assert bad.error is not None

    @pytest.mark.parametrize(
        "text",
        [
            "[parallelkit.plugins]\nthis line has no equals sign\n",
            "[parallelkit.plugins\nfoo = bar\n",
            "foo = before_any_section\n[parallelkit.plugins]\nfoo\n",
        ],
    )
    def test_malformed_entry_points_txt(self, distributions, text):
        distributions.good("aaa", "first")
        distributions.add("bbb-malformed", text)
        distributions.good("ccc", "last")
        found = load(distributions.manager())
        assert found["first"].state == found["last"].state == "loaded"

    def test_malformed_file_is_a_failure_of_its_distribution(self, distributions):
        distributions.add("bbb-malformed", "[parallelkit.plugins]\nno equals sign\n")
        (info,) = load(distributions.manager()).values()
        assert (info.state, info.dist) == ("failed", "bbb-malformed")
        assert "entry_points.txt" in info.reason

    def test_malformed_value(self, distributions):
        distributions.add("bbb", "bad = not a module!")
        distributions.add("ccc", "p bad!!=??")
        found = load(distributions.manager())
        for name, entry in (("bad", "bad = not a module!"), ("p bad!!", "p bad!! = ??")):
            assert found[name].state == "failed"
            assert f"`{entry}` is malformed" in found[name].reason

    @pytest.mark.parametrize(
        "header",
        ["[parallelkit.plugins", "parallelkit.plugins]", "[ parallelkit.plugins ]"],
    )
    def test_broken_header(self, distributions, header):
        distributions.add("bbb", f"[other]\na = b\n{header}\nfoo = bar\n", version="1.2")
        (info,) = load(distributions.manager()).values()
        assert (info.state, info.dist, info.version) == ("failed", "bbb", "1.2")
        assert "section header" in info.reason
        assert header in info.reason

    def test_file_that_is_no_text(self, distributions):
        place = distributions.add("bbb", "foo = bar")
        (file,) = Path(place).glob("*/entry_points.txt")
        file.write_bytes(b"[parallelkit.plugins]\nfoo = \xff\xfe\x00")
        distributions.good("ccc", "last")
        found = load(distributions.manager())
        assert found.pop("last").state == "loaded"
        (info,) = found.values()
        assert (info.state, info.dist) == ("failed", "bbb")
        assert "no UTF-8 text" in info.reason

    def test_a_mention_of_the_group_is_no_header(self, distributions):
        distributions.add("bbb", "[other]\nparallelkit.plugins = some_module\n")
        assert load(distributions.manager()) == {}

    def test_warns_once(self, distributions):
        distributions.add("bbb", "bad = pk_test_nowhere")
        manager = distributions.manager()
        with pytest.warns(PluginWarning) as record:
            manager.load()
        assert len(record) == 1
        manager.load()  # a second warning would be an error here

    def test_malformed_file_of_another_group_is_not_ours(self, distributions):
        distributions.add("bbb", "[other.group]\nno equals sign\n")
        assert load(distributions.manager()) == {}

    def test_distribution_without_metadata(self, distributions):
        module = distributions.good("aaa", "first")
        (info,) = Path(distributions.paths[0]).glob("*.dist-info")
        (info / "METADATA").unlink()
        found = load(distributions.manager())
        assert found["first"].state == "loaded"
        assert found["first"].dist == "aaa"
        assert module in sys.modules

    def test_strict_raises_and_chains(self, distributions):
        distributions.add("bbb", "bad = pk_test_nowhere", version="3.1")
        distributions.good("ccc", "last")
        manager = distributions.manager(PARALLELKIT_STRICT_PLUGINS="1")
        with pytest.raises(PluginLoadError, match=r"'bad' \(bbb 3.1\)") as caught:
            manager.load()
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)
        with pytest.raises(PluginLoadError):
            manager.load()  # again: a failed load is never taken for a finished one
        assert len(manager.load(strict=False).loaded) == 1

    @pytest.mark.parametrize("value", ["", "0", "false", "False", "off", " 0 "])
    def test_strict_off(self, distributions, value):
        distributions.add("bbb", "bad = pk_test_nowhere")
        assert load(distributions.manager(PARALLELKIT_STRICT_PLUGINS=value))


class TestWhatAPluginMustBe:
    """What pluggy takes silently is reported by the plugin's name."""

    def check(self, distributions, source: str, entry: str = "") -> loader.PluginInfo:
        module = "pk_test_subject"
        header = "from parallelkit.plugin import hookimpl, Candidate\nparallelkit_api = 1\n"
        source = header + textwrap.dedent(source)
        distributions.add("subject", f"subject = {module}{entry}", modules={module: source})
        distributions.good("witness", "witness")
        found = load(distributions.manager())
        assert found["witness"].state == "loaded"
        return found["subject"]

    def test_misspelt_hook(self, distributions):
        source = """
            @hookimpl
            def parallelkit_init_proces_group(spec): ...
            """
        info = self.check(distributions, source)
        assert info.state == "failed"
        assert "did you mean parallelkit_init_process_group" in info.reason

    def test_misspelt_specname(self, distributions):
        source = """
            @hookimpl(specname="parallelkit_prob")
            def f(request): ...
            """
        assert "did you mean parallelkit_probe" in self.check(distributions, source).reason

    def test_optional_hook_of_a_later_version(self, distributions):
        source = """
            @hookimpl(optionalhook=True)
            def parallelkit_from_the_future(spec): ...
            """
        assert self.check(distributions, source).state == "loaded"

    def test_wrong_argument(self, distributions):
        source = """
            @hookimpl
            def parallelkit_probe(reqest): ...
            """
        info = self.check(distributions, source)
        assert info.state == "failed"
        assert "reqest" in info.reason

    def test_marker_forgotten(self, distributions):
        info = self.check(distributions, "def parallelkit_probe(request): ...")
        assert "lacks the @hookimpl marker" in info.reason

    def test_marker_forgotten_in_a_subclass(self, distributions):
        source = """
            class Base:
                parallelkit_api = 1
                @hookimpl
                def parallelkit_probe(self, request): ...
                @hookimpl
                def parallelkit_diagnostics(self): ...
            class Sub(Base):
                def parallelkit_probe(self, request): ...
            plugin = Sub()
            """
        info = self.check(distributions, source, ":plugin")
        assert "parallelkit_probe lacks the @hookimpl marker" in info.reason

    def test_class_instead_of_instance(self, distributions):
        source = """
            class Plugin:
                parallelkit_api = 1
                @hookimpl
                def parallelkit_probe(self, request): ...
            """
        info = self.check(distributions, source, ":Plugin")
        assert info.state == "failed"
        assert "the class Plugin, not an instance" in info.reason

    @pytest.mark.parametrize("decorator", ["define", "frozen"])
    def test_attrs_with_eq(self, distributions, decorator):
        source = f"""
            import attrs
            @attrs.{decorator}
            class Plugin:
                parallelkit_api = 1
                @hookimpl
                def parallelkit_probe(self, request): ...
            plugin = Plugin()
            """
        assert "eq=False" in self.check(distributions, source, ":plugin").reason

    def test_attrs_without_eq(self, distributions):
        source = """
            import attrs
            @attrs.define(eq=False)
            class Plugin:
                parallelkit_api = 1
                @hookimpl
                def parallelkit_probe(self, request): ...
            plugin = Plugin()
            """
        assert self.check(distributions, source, ":plugin").state == "loaded"

    def test_no_hook_at_all(self, distributions):
        assert "no hook" in self.check(distributions, "x = 1").reason

    @pytest.mark.parametrize("option", ["wrapper=True", "hookwrapper=True"])
    def test_wrapper(self, distributions, option):
        source = f"""
            @hookimpl({option})
            def parallelkit_probe(request):
                return (yield)
            """
        assert "wrapper" in self.check(distributions, source).reason

    def test_coroutine(self, distributions):
        source = """
            @hookimpl
            async def parallelkit_probe(request): ...
            """
        assert "coroutine" in self.check(distributions, source).reason

    def test_properties_are_not_run(self, distributions):
        source = """
            class Plugin:
                parallelkit_api = 1
                @property
                def costly(self):
                    raise RuntimeError("run at registration")
                @hookimpl
                def parallelkit_probe(self, request): ...
            plugin = Plugin()
            """
        assert self.check(distributions, source, ":plugin").state == "loaded"

    def test_static_and_class_methods(self, distributions):
        source = """
            class Plugin:
                parallelkit_api = 1
                @staticmethod
                @hookimpl
                def parallelkit_probe(request): ...
                @classmethod
                @hookimpl
                def parallelkit_diagnostics(cls): ...
            plugin = Plugin()
            """
        assert self.check(distributions, source, ":plugin").state == "loaded"

    @pytest.mark.parametrize("stated", ["2", "'1'", "None", "True", "1.0"])
    def test_other_api_version(self, distributions, stated):
        info = self.check(distributions, f"parallelkit_api = {stated}")
        assert info.state == "failed"
        assert stated.strip("'") in info.reason or stated == "None"
        assert "speaks 1" in info.reason

    def test_version_is_negotiated_before_any_hook(self, distributions):
        source = """
            parallelkit_api = 7
            @hookimpl
            def parallelkit_probe(request):
                raise AssertionError("called")
            """
        info = self.check(distributions, source)
        assert "7" in info.reason
        assert "1" in info.reason

    def test_nothing_of_a_refused_plugin_stays(self, manager):
        module = types.ModuleType("pk_test_half")
        module.parallelkit_api = 1  # type: ignore[attr-defined]

        @hookimpl
        def parallelkit_diagnostics():
            return []

        @hookimpl
        def parallelkit_probe(wrong_argument): ...

        module.parallelkit_diagnostics = parallelkit_diagnostics  # type: ignore[attr-defined]
        module.parallelkit_probe = parallelkit_probe  # type: ignore[attr-defined]
        with pytest.raises(PluginLoadError, match="wrong_argument"):
            manager.register(module, name="half")
        assert manager.implementations("parallelkit_diagnostics") == []
        assert manager.plugins.plugins == ()


class TestNames:
    def test_one_module_under_two_names_is_one_plugin_and_a_note(self, distributions):
        module = distributions.good("aaa", "first")
        distributions.add("bbb", f"second = {module}")
        manager = distributions.manager()
        states = {p.name: p.state for p in manager.load().plugins}
        assert states == {"first": "loaded", "second": "duplicate"}
        (note,) = manager.plugins.notes
        assert "'second'" in note
        assert "'first'" in note
        assert len(manager.implementations("parallelkit_probe")) == 1

    def test_same_name_from_two_third_parties_is_an_error_naming_both(self, distributions):
        distributions.good("vendor-a", "accel", version="1.1")
        distributions.good("vendor-b", "accel", version="2.2")
        with pytest.warns(PluginWarning):
            failed = distributions.manager().load().failures
        assert [p.dist for p in failed] == ["vendor-a", "vendor-b"]
        for info in failed:
            assert "vendor-a 1.1 and vendor-b 2.2" in info.reason
            assert "PARALLELKIT_DISABLE_PLUGINS" in info.reason

    def test_the_setting_in_that_message_works(self, distributions):
        distributions.good("vendor-a", "accel")
        distributions.good("vendor-b", "accel")
        manager = distributions.manager(PARALLELKIT_DISABLE_PLUGINS="vendor-a")
        assert [p.dist for p in manager.load().loaded] == ["vendor-b"]

    def test_a_third_party_shadows_a_first_party(self, distributions):
        distributions.good("parallelkit-torch", "torch")
        distributions.good("vendor", "torch")
        manager = distributions.manager()
        states = {p.dist: p.state for p in manager.load().plugins}
        assert states == {"parallelkit-torch": "shadowed", "vendor": "loaded"}
        assert "vendor 1.0" in manager.plugins.notes[0]

    def test_a_shadowed_copy_of_a_distribution_does_not_count(self, distributions):
        distributions.good("vendor", "old", version="1.0")
        distributions.good("vendor", "new", version="2.0")
        distributions.paths.reverse()  # the newer one first, as on sys.path
        assert [p.name for p in distributions.manager().load().plugins] == ["new"]

    def test_order_does_not_depend_on_the_path(self, distributions):
        for dist in ("cc", "aa", "bb", "dd"):
            distributions.good(dist, f"plugin-{dist}")
        expected = [p.name for p in distributions.manager().load().plugins]
        for seed in range(5):
            random.Random(seed).shuffle(distributions.paths)
            manager = distributions.manager()
            assert [p.name for p in manager.load().plugins] == expected
            names = [i.plugin.name for i in manager.implementations("parallelkit_probe")]
            assert names == expected


class TestSettings:
    def names(self, distributions, **environ: str) -> dict[str, str]:
        return {p.name: p.state for p in load(distributions.manager(**environ)).values()}

    @pytest.fixture(autouse=True)
    def _two(self, distributions):
        self.one = distributions.good("dist-one", "one")
        self.two = distributions.good("Dist_Two", "two")

    @pytest.mark.parametrize("value", ["one", "dist-one", " one ", "one,,", "ONE", "Dist_One"])
    def test_allow(self, distributions, value):
        states = self.names(distributions, PARALLELKIT_PLUGINS=value)
        assert states == {"one": "loaded", "two": "blocked"}

    @pytest.mark.parametrize("value", ["", " ", "0", "false", "False"])
    def test_allow_nothing(self, distributions, value):
        states = self.names(distributions, PARALLELKIT_PLUGINS=value)
        assert states == {"one": "blocked", "two": "blocked"}

    @pytest.mark.parametrize("value", ["two", "dist-two", " dist_two , "])
    def test_deny(self, distributions, value):
        states = self.names(distributions, PARALLELKIT_DISABLE_PLUGINS=value)
        assert states == {"one": "loaded", "two": "blocked"}

    @pytest.mark.parametrize("value", ["", "0", "false", " "])
    def test_deny_nothing(self, distributions, value):
        states = self.names(distributions, PARALLELKIT_DISABLE_PLUGINS=value)
        assert set(states.values()) == {"loaded"}

    def test_blocked_before_it_is_imported(self, distributions):
        self.names(distributions, PARALLELKIT_DISABLE_PLUGINS="two")
        assert self.one in sys.modules
        assert self.two not in sys.modules

    def test_deny_beats_allow_and_the_reason_names_the_variable(self, distributions):
        manager = distributions.manager(
            PARALLELKIT_PLUGINS="one,two", PARALLELKIT_DISABLE_PLUGINS="two"
        )
        blocked = [p for p in manager.load().plugins if p.state == "blocked"]
        assert [p.name for p in blocked] == ["two"]
        assert "PARALLELKIT_DISABLE_PLUGINS='two'" in blocked[0].reason

    @pytest.mark.parametrize("variable", [discovery.ALLOW, discovery.DENY])
    def test_unknown_names_are_warned_about(self, distributions, variable):
        manager = distributions.manager(**{variable: "one,tow"})
        with pytest.warns(PluginWarning, match=f"{variable} names 'tow'.*did you mean 'two'"):
            manager.load()


class TestManager:
    def test_nothing_is_scanned_before_the_first_need(self, distributions):
        module = distributions.good("aaa", "first")
        manager = distributions.manager()
        assert manager.plugins.plugins == ()
        assert module not in sys.modules
        manager.implementations("parallelkit_probe")
        assert module in sys.modules

    def test_one_scan_from_many_threads(self, distributions, monkeypatch):
        distributions.good("aaa", "first")
        calls = []
        real = loader.list_entries
        monkeypatch.setattr(loader, "list_entries", lambda path: calls.append(1) or real(path))
        manager = distributions.manager()
        gate = threading.Barrier(8)

        def work() -> None:
            gate.wait()
            assert len(manager.load().loaded) == 1

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(calls) == 1

    def test_use_while_loading_is_refused(self, distributions):
        manager = distributions.manager()
        loader_module = sys.modules["parallelkit.loader"]
        loader_module.pk_test_manager = manager  # type: ignore[attr-defined]
        try:
            source = "from parallelkit import loader\nloader.pk_test_manager.load()"
            distributions.add("bbb", "bad = pk_test_reenter", modules={"pk_test_reenter": source})
            manager._path = distributions.paths
            assert "while it is imported" in load(manager)["bad"].reason
        finally:
            del loader_module.pk_test_manager  # type: ignore[attr-defined]

    def test_registered_after_the_scan(self, distributions):
        distributions.good("aaa", "first")
        manager = distributions.manager()
        manager.load()
        manager.register(FakePlugin(), name="late")
        names = [i.plugin.name for i in manager.implementations("parallelkit_probe")]
        assert sorted(names) == ["first", "late"]

    @pytest.mark.parametrize("early", [True, False])
    def test_registered_under_an_entry_points_name(self, distributions, early):
        distributions.good("aaa", "first")
        manager = distributions.manager()
        if not early:
            manager.load()
        manager.register(FakePlugin(), name="first")
        states = {(p.dist, p.state) for p in manager.load().plugins}
        assert states == {("", "loaded"), ("aaa", "shadowed")}
        (implementation,) = manager.implementations("parallelkit_probe")
        assert implementation.plugin.dist == ""

    def test_registered_twice(self, manager):
        manager.register(FakePlugin(), name="x")
        with pytest.raises(PluginLoadError, match="already"):
            manager.register(FakePlugin(), name="x")
        manager.unregister("x")
        manager.register(FakePlugin(), name="x")

    def test_one_object_under_two_names(self, manager):
        plugin = FakePlugin()
        manager.register(plugin, name="x")
        with pytest.raises(PluginLoadError, match="'y'"):
            manager.register(plugin, name="y")
        assert [p.name for p in manager.plugins.loaded] == ["x"]

    def test_the_core_brings_its_own_plugin(self):
        manager = PluginManager(environ={}, scan=False)
        (info,) = manager.load().plugins
        assert (info.name, info.dist, info.first_party) == ("builtin", "parallelkit", True)

    def test_nothing_survives_reset(self):
        pk.register(FakePlugin(), "mine")
        loader.reset()
        assert "mine" not in {p.name for p in pk.plugins()}

    def test_plugins_lists_what_is_installed(self):
        found = {p.name: p for p in pk.plugins()}
        for name in ("torch", "mindspore", "vllm"):
            assert found[name].dist == f"parallelkit-{name}"
            assert found[name].state == "loaded"
            assert found[name].first_party

    def test_unknown_hook(self, manager):
        with pytest.raises(ValueError, match="is not a hook"):
            manager.implementations("parallelkit_nothing")

    def test_values(self, manager):
        info = manager.register(FakePlugin(), name="x")
        assert info.as_dict()["state"] == "loaded"
        assert info.label == "'x' (registered here)"
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            info.state = "failed"

    def test_every_hook_is_documented(self):
        assert {n for n in vars(hookspecs) if n.startswith("parallelkit_")} == discovery.HOOKS
        for name in discovery.HOOKS:
            doc = getattr(hookspecs, name).__doc__
            assert "*Collect.*" in doc or "*First result" in doc.replace("\n    ", " ")

    def test_errors_are_plugin_errors(self):
        assert issubclass(PluginLoadError, PluginError)


def test_a_checkout_under_the_current_folder_is_the_installed_distribution(tmp_path, monkeypatch):
    """An `.egg-info`, as an editable install leaves it, has its name in PKG-INFO."""
    from parallelkit.discovery import list_entries

    for folder, file in (
        ("site/mine-1.0.dist-info", "METADATA"),
        ("src/mine.egg-info", "PKG-INFO"),
    ):
        info = tmp_path / folder
        info.mkdir(parents=True)
        (info / file).write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[parallelkit.plugins]\nmine = mine.plugin\n")
    found = list_entries([str(tmp_path / "src"), str(tmp_path / "site")])
    assert [(e.dist, e.version, e.name) for e in found] == [("mine", "1.0", "mine")]

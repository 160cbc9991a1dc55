"""The command line: reports, exit codes, one message for one mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from parallelkit import __version__, loader
from parallelkit.cli import bench, doctor
from parallelkit.cli.main import main
from parallelkit.loader import PluginManager
from parallelkit.plugin import DemoSpec, hookimpl
from parallelkit.spawn import RankResult
from parallelkit.testing.fake import FakePlugin


class Demo(FakePlugin):
    """A fake with a demo that notes what it was given."""

    specs: list[DemoSpec]

    @hookimpl
    def parallelkit_demo(self, spec: DemoSpec) -> int:
        self.specs = [spec]
        return 3


@pytest.fixture(autouse=True)
def _clean(clean_launch):
    clean_launch()


@pytest.fixture
def fake(monkeypatch) -> Demo:
    """Make a manager with one fake plugin the default one."""
    manager = PluginManager(environ={}, scan=False, builtin=False)
    plugin = Demo(reason="always [there]")  # brackets are no markup
    manager.register(plugin, name="fake")
    monkeypatch.setattr(loader, "_default", manager)
    return plugin


@pytest.fixture
def broken(monkeypatch, distributions) -> None:
    distributions.good("aaa", "good")
    distributions.add("bbb", "bad = pk_test_nowhere", version="1.5")
    monkeypatch.setattr(loader, "_default", distributions.manager())


def shell(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parallelkit.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | env,
    )


class TestPlugins:
    def test_table(self, broken, capsys):
        assert main(["plugins"]) == 0
        out = capsys.readouterr().out
        assert "bbb 1.5" in out
        assert "ModuleNotFoundError" in out
        assert "loaded" in out

    def test_json(self, broken, capsys):
        assert main(["plugins", "--json"]) == 0
        found = {p["name"]: p for p in json.loads(capsys.readouterr().out)["plugins"]}
        assert found["good"]["state"] == "loaded"
        assert found["bad"]["state"] == "failed"
        assert found["bad"]["version"] == "1.5"

    def test_strict_setting_does_not_hide_the_report(self, distributions, monkeypatch, capsys):
        distributions.add("bbb", "bad = pk_test_nowhere")
        manager = distributions.manager(PARALLELKIT_STRICT_PLUGINS="1")
        monkeypatch.setattr(loader, "_default", manager)
        assert main(["plugins"]) == 0
        assert "ModuleNotFoundError" in capsys.readouterr().out


class TestDoctor:
    def results(self, *codes: int):
        return lambda argv, n, timeout: [
            RankResult(rank=i, returncode=c, stdout="ok fine", stderr="trouble")
            for i, c in enumerate(codes)
        ]

    def test_without_self_test(self, fake, capsys):
        assert main(["doctor", "--no-self-test"]) == 0
        out = capsys.readouterr().out
        for part in ("always [there]", "launcher: none", "kind", "self-test: not run", "python"):
            assert part in out

    def test_self_test_passes(self, fake, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "spawn_ranks", self.results(0, 0))
        assert main(["doctor"]) == 0
        assert "self-test: passed" in capsys.readouterr().out

    def test_self_test_of_a_framework(self, fake, monkeypatch, capsys):
        started: list[list[str]] = []

        def start(argv: list[str], n: int, timeout: float) -> list[RankResult]:
            started.append(argv)
            return self.results(0, 0)(argv, n, timeout)

        monkeypatch.setattr(doctor, "spawn_ranks", start)
        assert main(["doctor", "--framework", "fake"]) == 0
        assert started[0][-1] == "fake"
        assert main(["doctor", "--framework", "nobodys"]) == 1
        assert "no plugin provides 'nobodys'" in capsys.readouterr().out
        assert len(started) == 1

    def test_self_test_fails(self, fake, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "spawn_ranks", self.results(0, 1))
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "self-test: FAILED" in out
        assert "trouble" in out

    def test_json(self, fake, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "spawn_ranks", self.results(0, 0))
        assert main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is True
        assert report["versions"]["parallelkit"] == __version__
        assert report["self_test"]["ok"] is True
        assert report["selections"][0]["winner"] == "fake"
        assert report["sections"][0]["title"] == "fake"
        assert report["orphans"] == []
        assert report["transports"] == []

    def test_transports_of_weights_are_listed(self, monkeypatch, capsys):
        manager = PluginManager(environ={}, scan=False)
        monkeypatch.setattr(loader, "_default", manager)
        assert [t["name"] for t in doctor.gather()["transports"]] == ["shm", "tcp"]
        main(["doctor", "--no-self-test"])
        assert "same host and user" in capsys.readouterr().out

    def test_nothing_to_choose(self, monkeypatch, capsys):
        manager = PluginManager(environ={}, scan=False, builtin=False)
        monkeypatch.setattr(loader, "_default", manager)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "nothing can be chosen" in out
        assert "pip install" in out

    def test_a_contradictory_launcher(self, fake, clean_launch, capsys):
        clean_launch(RANK="3")
        assert main(["doctor"]) == 1
        assert "WORLD_SIZE" in capsys.readouterr().out

    def test_broken_plugins_are_shown(self, broken, capsys):
        assert main(["doctor", "--no-self-test"]) == 0
        out = capsys.readouterr().out
        assert "bbb 1.5" in out
        assert "failed" in out

    def test_a_diagnosis_that_raises_is_shown(self, fake, capsys, monkeypatch):
        class Sick(FakePlugin):
            @hookimpl
            def parallelkit_diagnostics(self):
                raise OSError("driver gone")

        loader.default_manager().register(Sick("sick", score=0), name="sick")
        assert main(["doctor", "--no-self-test"]) == 0
        assert "driver gone" in capsys.readouterr().out

    def test_orphans(self, fake, capsys, monkeypatch):
        orphan = {"path": "/dev/shm/parallelkit-x", "reason": "process 1 is gone"}
        monkeypatch.setattr(doctor, "_orphans", lambda: [orphan])
        assert main(["doctor", "--no-self-test"]) == 0
        out = capsys.readouterr().out
        assert "/dev/shm/parallelkit-x" in out
        assert "process 1 is gone" in out

    @pytest.mark.ranks
    def test_two_real_ranks(self):
        """The real thing: two processes, the installed framework, exit codes and no warning."""
        pytest.importorskip("torch")
        result = shell("doctor", "--json")
        report = json.loads(result.stdout)
        assert report["self_test"]["ok"], report["self_test"]
        assert result.returncode == 0
        assert [r["said"] for r in report["self_test"]["ranks"]] == [
            "ok torch/gloo on cpu, 2 ranks"
        ] * 2
        assert result.stderr == ""


class TestRun:
    def test_command_line(self, fake, tmp_path, capsys):
        script = tmp_path / "train.py"
        script.write_text("")
        assert main(["run", "-n", "4", "--dry-run", str(script), "--lr", "0.1"]) == 0
        assert capsys.readouterr().out.split() == [sys.executable, str(script), "--lr", "0.1"]

    @pytest.mark.parametrize(("code", "expected"), [("0", 0), ("7", 7)])
    def test_exit_code(self, fake, tmp_path, code, expected):
        script = tmp_path / "train.py"
        script.write_text("import sys; sys.exit(int(sys.argv[1]))")
        assert main(["run", "-n", "1", str(script), code]) == expected

    def test_a_signal_is_reported_as_a_shell_does(self, fake, tmp_path):
        script = tmp_path / "train.py"
        script.write_text("import os; os.kill(os.getpid(), 15)")
        assert main(["run", "-n", "1", str(script)]) == 128 + signal.SIGTERM

    def test_mistakes(self, fake, tmp_path, capsys):
        assert main(["run", "-n", "2", str(tmp_path / "none.py")]) == 2
        assert "none.py" in capsys.readouterr().err
        assert main(["run", "-n", "0", __file__]) == 2
        assert main(["run", "-n", "2", "--framework", "fak", __file__]) == 2
        assert "did you mean 'fake'" in capsys.readouterr().err


class TestDemo:
    def test_settings(self, fake):
        argv = ["demo", "--seed", "5", "--steps", "10", "--every", "2", "--output", "x.html"]
        assert main(argv) == 3
        assert fake.specs == [
            DemoSpec(framework="fake", seed=5, steps=10, every=2, output="x.html")
        ]

    def test_defaults_are_those_of_the_spec(self, fake):
        main(["demo"])
        assert fake.specs == [DemoSpec(framework="fake")]


class TestBench:
    @pytest.fixture
    def checkout(self, tmp_path, monkeypatch) -> Path:
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        source = '''
            """Says what it was given.

            More."""
            import sys
            print(*sys.argv[1:], flush=True)
            sys.exit(len(sys.argv) - 1)
            '''
        (folder / "bench_echo.py").write_text(textwrap.dedent(source).lstrip())
        (folder / "bench_other.py").write_text("pass")
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_list(self, checkout, capsys):
        assert main(["bench", "--list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["echo", "other"]
        assert "Says what it was given." in lines[0]

    def test_arguments_and_exit_code(self, checkout, capfd):
        assert main(["bench", "echo", "--output", "x.json"]) == 2
        assert capfd.readouterr().out.split() == ["--output", "x.json"]

    def test_unknown(self, checkout, capsys):
        assert main(["bench", "ecko"]) == 2
        assert "did you mean 'echo'" in capsys.readouterr().err

    def test_no_checkout(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
        assert main(["bench", "echo"]) == 2
        assert "source checkout" in capsys.readouterr().err


class TestPlan:
    def test_table(self, capsys):
        assert main(["plan", "8", "--tensor", "2", "--data-shard", "-1"]) == 0
        assert "data_shard 4 x tensor 2" in capsys.readouterr().out

    def test_json(self, capsys):
        assert main(["plan", "8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["degrees"]["data"] == 8

    def test_impossible(self, capsys):
        assert main(["plan", "8", "--tensor", "3"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("parallelkit plan: ")

    def test_world_size_by_name(self, capsys):
        argv = ["plan", "--world-size", "64", "--tensor", "8", "--pipeline", "2", "--offset", "8"]
        assert main(argv) == 0
        assert "64 ranks from 8 on = pipeline 2 x data 4 x tensor 8" in capsys.readouterr().out

    @pytest.mark.parametrize("argv", [[], ["8", "--world-size", "8"], ["eight"]])
    def test_world_size_once(self, argv, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["plan", *argv])
        assert caught.value.code == 2
        assert "world_size" in capsys.readouterr().err

    def test_svg(self, tmp_path, capsys):
        path = tmp_path / "plan.svg"
        assert main(["plan", "4", "--tensor", "2", "--svg", str(path)]) == 0
        assert "data 2 x tensor 2" in capsys.readouterr().out
        assert main(["plan", "4", "--tensor", "2", "--svg", "-"]) == 0
        assert path.read_text() == capsys.readouterr().out
        assert path.read_text().startswith("<svg ")

    def test_svg_that_cannot_be_written(self, tmp_path, capsys):
        assert main(["plan", "4", "--svg", str(tmp_path / "no" / "plan.svg")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "cannot be written" in captured.err


class TestMain:
    def test_one_message_without_a_traceback(self):
        result = shell("plan", "8", "--tensor", "3")
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_traceback_when_asked_for(self):
        result = shell("plan", "8", "--tensor", "3", PARALLELKIT_TRACE="1")
        assert "Traceback" in result.stderr
        assert "PlanError" in result.stderr
        assert "Traceback" not in shell("plan", "8", "--tensor", "3", PARALLELKIT_TRACE="0").stderr

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code == 0
        assert __version__ in capsys.readouterr().out

    @pytest.mark.parametrize("argv", [[], ["nonsense"], ["run", "script.py"]])
    def test_usage(self, argv, capsys):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "usage" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["plugins", "doctor", "plan", "run", "demo", "bench"])
    def test_help(self, command, capsys):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "usage: parallelkit" in capsys.readouterr().out

    def test_a_reader_that_leaves(self):
        result = subprocess.run(
            f"{sys.executable} -m parallelkit.cli.main plan 16 --json | true",
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in result.stderr

    def test_help_loads_no_plugin_and_no_rich(self):
        code = """
import sys
from parallelkit.cli.main import build_parser
build_parser()
print([m for m in ("rich", "pluggy", "parallelkit_torch") if m in sys.modules])
"""
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert result.stdout.strip() == "[]", result.stderr

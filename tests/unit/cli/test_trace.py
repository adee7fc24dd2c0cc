"""``dovetail trace``: which steps are shown, what is said of them, trace and picture."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from dovetail.cli import main, trace
from dovetail.cli.timeline import COLOURS, draw_timeline
from dovetail.cli.trace import SKIPPED, Tracer, chrome_trace, steps_in_a_row, summarise, told
from dovetail.config.gpu import Gpu
from dovetail.config.schema import EngineConfig
from dovetail.errors import RequestError
from dovetail.exec.device import ThreadedCpuDevice
from dovetail.exec.trace import HostClock, Recorder, Span, note_lanes

WORDS = (
    "trace", "--device", "cpu", "--steps", "5", "--batch", "3", "--input-len", "20",
    "--chunk-size", "16",
)  # fmt: skip


def test_a_trace_has_every_call_and_work_of_its_steps(tmp_path: Path, capsys) -> None:
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    assert main([*WORDS, "--out", str(file), "--png", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "5 decode steps of 3 rows on cpu" in said and "lane idle" in said
    assert "GPU idle" not in said
    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    shown = [(rows[e["tid"]], e["name"], e["args"]["step"]) for e in events if e["ph"] == "X"]
    steps = sorted({step for _, _, step in shown})
    assert steps == list(range(steps[0], steps[0] + 5))
    once = [
        *((f"host: {name}", name) for name in ("plan", "submit", "wait", "commit")),
        ("compute lane", "run"), ("copy lane", "download"),
    ]  # fmt: skip
    assert sorted(shown) == sorted((row, name, step) for row, name in once for step in steps)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("gpu", "device"), [(None, "cpu"), (Gpu(name="NVIDIA H200", memory_bytes=2**37), "cuda")]
)
def test_lanes_are_those_of_the_device_that_an_engine_takes(
    gpu: Gpu | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No --device: the GPU, if there is one."""

    def noted(config: EngineConfig) -> None:
        raise LookupError(config.device)

    monkeypatch.setattr(trace, "find_gpu", lambda: gpu)
    monkeypatch.setattr(trace, "noted_device", noted)
    with pytest.raises(LookupError, match=device):
        Tracer({})


def test_idle_is_the_time_in_which_the_compute_lane_has_nothing() -> None:
    spans = [
        span
        for step in range(3)
        for span in (
            Span("host", "submit", step, 10.0 * step, 10.0 * step + 1),
            Span("host", "wait", step, 10.0 * step + 1, 10.0 * step + 9),
            Span("compute", "upload", step, 10.0 * step + 2, 10.0 * step + 3),
            Span("compute", "run", step, 10.0 * step + 3, 10.0 * step + 8),
            Span("copy", "download", step, 10.0 * step + 8, 10.0 * step + 9),
        )
    ]
    steps = summarise(spans, [0, 1, 2])
    assert steps.step_s == [10, 10] and steps.busy_s == [6, 6] and steps.host_s == [1, 1]
    assert steps.lane_idle == pytest.approx(0.4)
    assert {span.step for span in steps.spans} == {0, 1}
    assert len(chrome_trace(steps.spans)["traceEvents"]) == 4 + 10


def test_a_gpu_is_idle_while_no_graph_runs() -> None:
    spans = [
        span
        for step in range(3)
        for span in (
            Span("compute", "run", step, 10.0 * step, 10.0 * step + 8),
            Span("graph", "replay", step, 10.0 * step + 1, 10.0 * step + 6),
        )
    ]
    steps = summarise(spans, [0, 1, 2])
    assert steps.busy_s == [8, 8] and steps.graph_s == [5, 5]
    assert steps.lane_idle == pytest.approx(0.2) and steps.gpu_idle == pytest.approx(0.5)
    said = told(steps)
    assert "graph 5000.000 ms" in said and "lane idle 20.0%" in said and "GPU idle 50.0%" in said
    spans = [span for span in spans if span.step != 1 or span.row == "compute"]
    without = summarise(spans, [0, 1, 2])
    assert without.gpu_idle is None and "GPU idle" not in told(without)


def test_a_replay_is_noted_if_there_was_a_graph() -> None:
    recorder = Recorder(HostClock())
    recorder.step = 7
    replay = recorder.replay(lambda shape: shape if shape > 1 else None)
    assert replay(1) is None and replay(2) == 2
    [span] = recorder.spans()
    assert (span.row, span.name, span.step) == ("graph", "replay", 7)
    assert span.begin_s <= span.end_s


def test_a_graph_has_a_row_of_its_own(tmp_path: Path) -> None:
    work = Span("compute", "run", 0, 0.0, 4.0)
    colour = tuple(int(COLOURS["replay"][i : i + 2], 16) for i in (1, 3, 5))
    found = []
    for spans in ([work], [work, Span("graph", "replay", 0, 1.0, 3.0)]):
        draw_timeline(spans, "title", tmp_path / "t.png")
        with Image.open(tmp_path / "t.png") as image:
            colours = {rgb for _, rgb in image.getcolors(maxcolors=2**16)}
            found.append((image.height, colour in colours))
    (height, is_there), (with_graph, is_there_too) = found
    assert with_graph > height and (is_there, is_there_too) == (False, True)


def test_steps_are_in_a_row_or_refused() -> None:
    steady = [3, *range(5, 40)]
    assert steps_in_a_row(steady, 4) == [*range(4 + SKIPPED, 9 + SKIPPED)]
    with pytest.raises(RequestError, match="in a row"):
        steps_in_a_row(steady[: SKIPPED + 4], 4)
    with pytest.raises(RequestError, match="in a row"):
        steps_in_a_row([*range(SKIPPED + 2), *range(50, 60)], 4)  # a retraction in between


def test_a_span_is_drawn_where_and_as_long_as_it_was(tmp_path: Path) -> None:
    spans = [Span("host", "plan", 0, 0.0, 1.0), Span("compute", "run", 0, 1.0, 4.0)]
    draw_timeline(spans, "title", tmp_path / "t.png")
    image = Image.open(tmp_path / "t.png")
    found = {rgb: count for count, rgb in image.getcolors(maxcolors=2**16)}
    counts = {
        name: found.get(tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)), 0)
        for name, colour in COLOURS.items()
    }
    assert 2.8 < counts["run"] / counts["plan"] < 3.2
    assert sum(counts.values()) == counts["run"] + counts["plan"]


def test_work_is_timed_on_its_lane(tmp_path: Path) -> None:
    """A lane with a thread of its own runs work later than it is submitted."""
    recorder = Recorder(HostClock())
    device = ThreadedCpuDevice()
    note_lanes(device, recorder)

    def wait_for_nothing() -> None:
        done.append(None)

    done: list[None] = []
    recorder.step = 3
    device.compute.submit(wait_for_nothing)
    recorder.step = 4
    recorder.call("plan", device.compute.record().wait)()
    work, call = sorted(recorder.spans(), key=lambda span: span.row, reverse=False)
    assert (work.row, work.name, work.step) == ("compute", "wait_for_nothing", 3)
    assert (call.row, call.name, call.step) == ("host", "plan", 4)
    assert done and work.begin_s <= work.end_s <= call.end_s
    device.close()


def test_without_pillow_the_error_names_it_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    for name in ("PIL", "PIL.Image", "PIL.ImageDraw", "PIL.ImageFont"):
        monkeypatch.setitem(sys.modules, name, None)
    words = [*WORDS, "--model", str(tmp_path / "none"), "--png", str(tmp_path / "t.png")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "png" in error and "pip install matplotlib pillow" in error and "none" not in error


@pytest.mark.parametrize("flag", ["--out", "--png"])
@pytest.mark.parametrize("name", ["", "none/x"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(
    flag: str, name: str, tmp_path: Path, capsys
) -> None:
    others = ["--out", str(tmp_path / "t.json")]
    words = [*WORDS, "--model", str(tmp_path / "model"), *others, flag, str(tmp_path / name)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"error: {flag}: cannot write {tmp_path / name}: " in error
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_left_as_it_is_until_there_is_another(tmp_path: Path, capsys) -> None:
    file = tmp_path / "t.json"
    file.write_text("before")
    assert main([*WORDS, "--model", str(tmp_path / "model"), "--out", str(file)]) == 2
    assert "model" in capsys.readouterr().err and file.read_text() == "before"


def test_a_picture_that_fails_at_last_names_its_flag(tmp_path: Path, capsys, monkeypatch) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "draw_timeline", fill_the_disk)
    words = [*WORDS, "--out", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]
    assert main(words) == 2
    assert f"--png: cannot write {tmp_path / 't.png'}: No space" in capsys.readouterr().err


def test_too_few_steady_steps_are_refused(tmp_path: Path, capsys) -> None:
    """A pool that cannot hold all rows at once has no steps of so many rows."""
    words = ["trace", "--device", "cpu", "--steps", "5", "--batch", "8", "--input-len", "60"]
    words += ["--context-len", "128", "--num-pages", "16", "--out", str(tmp_path / "t.json")]
    assert main(words) == 2
    assert "--steps" in capsys.readouterr().err and not (tmp_path / "t.json").exists()

# SPDX-License-Identifier: Apache-2.0
"""Objects at a prompt and in a notebook: readable, in GB, at any time of their lives."""

import io
import re
import sys
import textwrap

import pytest
import torch

from cpu_offloading import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    TrainableLayerStreamer,
    apply_plan,
    fit,
    park,
)
from cpu_offloading.tiny import Decoder, DecoderShape, add_lora, decoder_loss
from reference_impl.memory.shown import size


def decoder() -> Decoder:
    return Decoder(DecoderShape(layers=4))


def frozen() -> Decoder:
    model = decoder()
    add_lora(model)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def fitted():
    model, ids = decoder(), torch.randint(512, (2, 64))
    return fit(model, adamw(model), ids, lambda model, ids: decoder_loss(model(ids), ids), progress=False)


def applied():
    model = decoder()
    return apply_plan(model, adamw(model), {"execute": {"optimizer": {"offload_fraction": 0.5}}})


SHOWN = {
    "fit": (fitted, ("plan: ", "peak on the device: ", " GB", " s, tried: ")),
    "apply_plan": (applied, ("optimizer: HybridDeviceOptimizer(", "updated on the CPU: 50%")),
    "hybrid": (
        lambda: HybridDeviceOptimizer(decoder().parameters(), lr=1e-4, split=(0.25, 0.25, 0.5)),
        ("states on the device: 25%, streamed from the host: 25%, updated on the CPU: 50%, lr: 0.0001, status: untou",),
    ),
    "states": (lambda: OptimizerStateOffloader(adamw(decoder())), ("streamed from the host: 100%",)),
    "trained layers": (
        lambda: (lambda model: TrainableLayerStreamer(model, adamw(model)))(decoder()),
        ("host memory: ", "window on the device: ", " MB", "optimizer: "),
    ),
    "frozen layers": (lambda: FrozenLayerStreamer(frozen()), ("layers: 4", "weights on the host: ", "attached")),
    "activations": (lambda: ActivationOffloader(decoder(), num_layers=2), ("left the device: 0 MB", "attached")),
    "checkpoints": (lambda: CheckpointOffloader(decoder()), ("left the device: 0 MB", "attached")),
    "parking": (lambda: (lambda model: park(model, adamw(model)))(decoder()), ("status: present", "host: 0 MB")),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_an_object_says_what_it_is_while_it_is_open_and_afterwards(name):
    make, words = SHOWN[name]
    made = make()
    line, page = repr(made), made._repr_html_()
    for word in words:
        assert word in line
    assert "\n" not in line
    assert re.fullmatch(r"<table><caption>\w+</caption><tbody>(<tr><th[^>]*>[^<]+</th><td[^>]*>[^<]*</td></tr>)+"
                        r"</tbody></table>", page)  # fmt: skip
    made.close()
    assert type(made).__name__ in repr(made)
    assert made._repr_html_()


def test_reports_are_in_gb_where_people_read_them_and_exact_in_code():
    streamer = FrozenLayerStreamer(frozen())
    report = streamer.report
    assert f"streamed: {size(report.streamed_bytes)}" in str(report)
    assert f"streamed_bytes={report.streamed_bytes}" in repr(report)
    assert (size(12_340_000_000), size(1_234_567), size(0)) == ("12.34 GB", "1.23 MB", "0 MB")
    streamer.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said(monkeypatch, stream, **options):
    monkeypatch.setattr(sys, "stderr", stream)
    model, ids = decoder(), torch.randint(512, (2, 64))
    fit(model, adamw(model), ids, lambda model, ids: decoder_loss(model(ids), ids), **options).close()
    return stream.getvalue()


def test_fit_says_what_it_does_in_lines_or_in_one_that_changes(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    lines = said(monkeypatch, io.StringIO()).splitlines()
    assert lines[:2] == ["fit: tracing a step of Decoder", "fit: planning"]
    assert lines[2].startswith("fit: trial 1, ")
    assert lines[2].endswith(": step 1 of 2")
    assert re.fullmatch(r"fit: trial 1, .*: step 2 of 2, peak so far \d+(\.\d+)? MB", lines[3])
    live = said(monkeypatch, Terminal())
    assert "\n" not in live
    assert [part for part in live.split("\r\x1b[2K") if part] == [line[:79] for line in lines]
    assert live.endswith("\r\x1b[2K"), "the line is taken away"


def test_fit_is_silent_or_tells_a_function(monkeypatch):
    assert said(monkeypatch, io.StringIO(), progress=False) == ""
    told = []
    assert said(monkeypatch, io.StringIO(), progress=told.append) == ""
    assert told[0] == "tracing a step of Decoder"


NOTEBOOK = """
    import torch
    from cpu_offloading import HybridDeviceOptimizer
    optimizer = HybridDeviceOptimizer(torch.nn.Linear(64, 64).parameters(), lr=1e-4)
    optimizer
"""


@pytest.mark.slow
def test_a_notebook_shows_a_table():
    reason = "needs a notebook's kernel: pip install nbclient nbformat ipykernel"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(NOTEBOOK))])
    nbclient.NotebookClient(book, kernel_name="python3", timeout=None).execute()
    (output,) = (each for each in book.cells[0].outputs if each.output_type == "execute_result")
    assert output.data["text/html"].startswith("<table><caption>HybridDeviceOptimizer</caption>")
    assert output.data["text/plain"].startswith("HybridDeviceOptimizer(parameters: 4,160, ")

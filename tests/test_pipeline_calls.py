"""What `CudaPipeline` asks of the native library, and when; the library itself is recorded calls here."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bnb_fsdp.backends import base, cuda_pipeline


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def checked(name: str) -> Any:
        def call(*arguments: Any) -> None:
            made.append(name.removeprefix("pipeline_"))
            if name == "pipeline_create":
                arguments[-1]._obj.value = 77

        return call

    native = SimpleNamespace(function=lambda *_: lambda handle: made.append("destroy"))
    monkeypatch.setattr(cuda_pipeline, "_checked", checked)
    monkeypatch.setattr(cuda_pipeline, "library", lambda: SimpleNamespace(native=native))
    monkeypatch.setattr(cuda_pipeline, "index_of", lambda device: 0)
    monkeypatch.setattr(cuda_pipeline, "raw_stream", lambda index: 0)
    return made


def test_buffers_go_only_after_what_a_step_began_with_has_come_in(calls: list[str]) -> None:
    pipeline = cuda_pipeline.CudaPipeline(torch.device("cpu"), 3)
    pipeline.resize(1024)
    assert calls == ["create", "follow"] and [len(buffer) for buffer in pipeline.buffers] == [1024] * 3
    prepared: Any = SimpleNamespace(chunks=[None] * 2, copies=[], ticket=5)
    pipeline.wait()
    assert calls[2:] == []  # nothing was queued
    pipeline.begin(prepared, 2)  # and the step is refused
    pipeline.resize(0)
    assert calls[2:] == ["begin", "wait"] and pipeline.buffers == []
    pipeline.wait()
    assert calls[4:] == []
    pipeline.step(prepared, 0, None, None, 0)
    pipeline.wait()
    pipeline.wait()
    assert calls[4:] == ["step", "wait"]
    del pipeline
    assert calls[6:] == ["destroy"]


def test_buffers_that_could_not_be_had_are_asked_for_again(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = cuda_pipeline.CudaPipeline(torch.device("cpu"), 3)
    pipeline.resize(512)
    real, left = torch.empty, 2

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("simulated")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            pipeline.resize(1024)
        assert pipeline.buffers == [] and pipeline.chunk_bytes == 0
        left = 2
    left = 3
    pipeline.resize(1024)
    assert [len(buffer) for buffer in pipeline.buffers] == [1024] * 3 and pipeline.chunk_bytes == 1024


def test_a_forked_process_and_the_end_of_the_process_leave_the_device_alone(calls: list[str]) -> None:
    base.in_process(os.getpid() + 1, calls.append, "destroy")
    assert calls == []
    pipeline = cuda_pipeline.CudaPipeline(torch.device("cpu"), 3)
    [own] = [f for f in weakref.finalize._registry if f.peek() and f.peek()[0] is pipeline]  # type: ignore[attr-defined]
    assert not own.atexit

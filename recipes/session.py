"""One run of the program on one rank: banner, run folder, loop, checkpoints, signals, last words."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from moe_ep import doctor
from moe_ep.dispatch import close_dispatchers
from moe_ep.schema import require
from moe_ep.tracing import step_range
from recipes import plots
from recipes.build import build, make_way, resume
from recipes.files import replace_text, unwritable, writing
from recipes.generate import generate
from recipes.lock import FolderLock
from recipes.metrics_file import MetricsFile, Row, closing_line, console_line, read_rows
from recipes.ranks import Ranks
from recipes.recipe import Recipe, to_toml
from recipes.train_loop import Trainer, save, train_step, validate, with_validation

PROMPT = b"def "
SAMPLE_TOKENS = 100


class Session:
    """A recipe on the running ranks. Rank 0 prints and writes; all ranks take every decision together."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.stop_asked = False
        self.profiler: torch.profiler.profile | None = None
        self.last_row: Row | None = None
        self.lock = FolderLock()

    def run(self) -> None:
        """Train until the last step or SIGTERM, then save and say how it went."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        trainer = build(self.recipe, self.ranks)
        self._banner(trainer)
        self.hold_folder()
        self.say(resume(trainer))
        self._check_steps(trainer)
        if (said := make_way(trainer)) is not None:
            self.say(said)
            self.hold_folder()  # it may be a new one
        metrics = self._open_folder(trainer)
        stopped, first, started = False, trainer.step, time.monotonic()
        while trainer.step < self.recipe.train.steps and not stopped:
            stopped = self._step(trainer, metrics)
        self._stop_trace()
        trained = f"{trainer.step - first} of them here in {timedelta(seconds=round(time.monotonic() - started))}"
        save(trainer)
        pictures = self._plots()
        self._last_words(trainer, stopped, trained, pictures)

    def close(self) -> None:
        """Leave the process group in order; every rank is done."""
        for group in {self.ranks.ep_group, None}:
            close_dispatchers(group)
        if self.ranks.group is not None:
            dist.barrier(group=self.ranks.group)
            dist.destroy_process_group()

    def hold_folder(self) -> None:
        """See that no other run writes into this one's folder; rank 0 holds its lock.

        Raises:
            RecipeError: on every rank; another one does.
        """
        said = self.ranks.together(lambda: self.lock.hold(self.recipe.folder) if self.ranks.rank == 0 else None)
        if said is not None:
            self.say(said)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked = True

    def _step(self, trainer: Trainer, metrics: MetricsFile | None) -> bool:
        """One step and what is due after it; returns whether to stop."""
        recipe, number = self.recipe, trainer.step + 1
        self._trace(number)
        with step_range(number):
            row, sums = train_step(trainer, self.stop_asked)
        last = number == recipe.train.steps
        due = _due(number, recipe.metrics.valid_every) or last
        if due and not sums.stop:
            row = with_validation(trainer, row)
        if number == 1 or _due(number, recipe.metrics.every) or due or sums.stop:
            self.say(console_line(row, recipe.train.steps))
            self.ranks.together(
                lambda: None if metrics is None else metrics.add(row, sums)
            )  # a full disk ends all alike
        self.last_row = row
        if _due(number, recipe.checkpoint.every):
            save(trainer)
        return sums.stop

    def _check_steps(self, trainer: Trainer) -> None:
        steps, step, path = self.recipe.train.steps, trainer.step, trainer.resumed_from
        text = (
            f"{self.recipe.source} [train]: steps = {steps} lies below step {step} of {path}, where the run stands; "
            "raise it, let checkpoint.resume name an older checkpoint, or choose another run.name"
        )
        self.ranks.together(lambda: require(step <= steps, text))
        if step == steps:
            self.say(
                f"nothing is left to train: train.steps = {steps} are done; raise it to go on, or start afresh with "
                "another run.name or checkpoint.resume=never"
            )

    def _banner(self, trainer: Trainer) -> None:
        recipe, ranks, info = self.recipe, self.ranks, trainer.corpus
        total, active = parameter_counts(trainer)
        experts = recipe.model.num_experts // ranks.ep_size if trainer.moe else 0
        for layer in trainer.moe[:1]:
            moe = recipe.moe
            self.say(
                f"dispatcher {layer.dispatcher.describe()}; experts {moe.experts}; router {moe.router}; coefficients: "
                f"{moe.aux_loss} balancing loss {moe.aux_loss_coef:g}, z-loss {moe.z_loss_coef:g}"
            )
            if layer.replicas is not None:
                self.say(layer.replicas.describe())
        self.say(
            f"{ranks.world_size} rank(s) on {ranks.device.type}: {ranks.dp_size} data parallel x {ranks.ep_size} "
            f"expert parallel, {experts} experts a rank; {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M of them "
            "at work for a token"
        )
        self.say(
            f"text: {info.source}, {info.train_bytes / 1e6:.1f} MB in {info.train_files} files; held out: "
            f"{info.valid_bytes / 1e3:.0f} kB in {info.valid_files} files, unigram entropy "
            f"{info.valid_unigram_entropy:.3f}, gzip {info.valid_gzip:.3f} nats/byte"
        )

    def _open_folder(self, trainer: Trainer) -> MetricsFile | None:
        """Make the run's folder with its recipe, its environment and its metrics file; rank 0 writes."""

        def make() -> MetricsFile | None:
            if self.ranks.rank != 0:
                return None
            folder = self.recipe.folder
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / "recipe.toml", to_toml(self.recipe))
            environment = {**doctor.diagnose(), "corpus": asdict(trainer.corpus)}
            replace_text(folder / "env.json", json.dumps(environment, indent=1) + "\n")
            return MetricsFile(folder / "metrics.jsonl", trainer.step)

        file: MetricsFile | None = self.ranks.together(make)
        return file

    def _trace(self, number: int) -> None:
        steps = self.recipe.metrics.trace_steps
        if steps is None:
            return
        if number > steps[1]:
            self._stop_trace()
        elif number >= steps[0] and self.profiler is None:  # a resumed run may start inside the window
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def _stop_trace(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        path = self.recipe.folder / "trace" / f"rank{self.ranks.rank}.json"
        self.ranks.together(lambda: export_trace(profiler, path))

    def _plots(self) -> list[Path]:
        """Draw the pictures; a run never fails for want of one."""
        if self.ranks.rank != 0:
            return []
        try:
            return plots.draw(self.recipe.folder)
        except ImportError as err:
            self.say(f"no plots: {err}; pip install 'moe-ep[plots]' and rerun: it resumes at the last step")
        except Exception as err:  # a full disk, or whatever else goes wrong in somebody else's library
            self.say(
                f"no plots in {self.recipe.folder}: {type(err).__name__}: {err}; rerun: it resumes at the last step"
            )
        return []

    def _last_words(self, trainer: Trainer, stopped: bool, trained: str, pictures: list[Path]) -> None:
        folder, row = self.recipe.folder, self.last_row
        if stopped:
            done = trainer.step == self.recipe.train.steps
            rest = "that was the last one: the run is complete" if done else "the same command goes on"
            self.say(f"SIGTERM: saved step {trainer.step} in {folder / 'checkpoints'}; {rest}")
            return
        loss = row.valid_loss if row is not None else validate(trainer)
        self.say(
            f"done: held-out loss {loss:.4f} nats/byte (unigram entropy {trainer.corpus.valid_unigram_entropy:.3f}, "
            f"gzip {trainer.corpus.valid_gzip:.3f}) after {trainer.step} steps, {trained}"
        )
        rows = self.ranks.together(lambda: read_rows(folder / "metrics.jsonl") if self.ranks.rank == 0 else [])
        if rows:
            self.say(closing_line(rows))
        sample = generate(trainer.model, PROMPT, SAMPLE_TOKENS, 0.7, self.recipe.train.seed)
        self.say("sample: " + (PROMPT + sample).decode("utf-8", "replace"))
        drawn = f"  plots {', '.join(map(str, pictures))}" if pictures else ""
        self.say(f"metrics {folder / 'metrics.jsonl'}{drawn}")


def export_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Write a trace. The profiler says nothing where the disk is full, so its end is looked at.

    Raises:
        RunFolderError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        end = b""
        if path.exists():  # the profiler may have written nothing at all, and says nothing of that either
            with path.open("rb") as file:
                file.seek(-min(1000, os.fstat(file.fileno()).st_size), os.SEEK_END)
                end = file.read()
    if b'"traceName"' not in end or not end.rstrip().endswith(b"}"):
        path.unlink(missing_ok=True)
        raise unwritable(path, "only a part of it was")


def parameter_counts(trainer: Trainer) -> tuple[int, float]:
    """Parameters of the whole model, over all ranks, and how many of them work for one token."""
    here = sum(p.numel() for p in trainer.model.parameters())
    experts = sum(p.numel() for layer in trainer.moe for p in layer.experts.parameters())
    model, everywhere = trainer.recipe.model, experts * trainer.ranks.ep_size
    return here - experts + everywhere, here - experts + everywhere * model.top_k / model.num_experts


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0

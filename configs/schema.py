"""Every knob of an experiment, as frozen dataclasses of the standard library: the model's are in `configs.model`, the run's here.

`None` means off (or, where the text says so, "follow the other knob"); no derived value is stored. The text under a knob is
what `--help` prints. Rules inside a section are checked by the section; rules between sections, by `Experiment`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from configs.knobs import check_values, flatten, require
from configs.model import Model

Schedule = Literal["cosine", "linear", "constant", "wsd"]
Remat = Literal["none", "dots", "full"]
ParameterGroup = Literal["embed", "positions", "head", "attention", "mlp", "moe", "norm", "qk_norm", "bias", "sinks"]


@dataclass(frozen=True)
class Optim:
    """The optimiser and its schedule."""

    kind: Literal["adamw"] = "adamw"
    """The update rule."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of the parameters that `decay` names."""
    independent_decay: bool = False
    """Decay by weight_decay times the schedule alone, not times the learning rate too (Loshchilov and Hutter's form)."""
    decay: tuple[ParameterGroup, ...] = ("embed", "positions", "head", "attention", "mlp", "moe")
    """Groups of parameters that decay."""
    warmup: int = 15
    """Steps of linear warmup."""
    schedule: Schedule = "cosine"
    """After warmup: cosine or linear to floor, constant, or constant and linear over the last cooldown share (wsd)."""
    floor: float = 0.0
    """Last learning rate as a share of the peak."""
    cooldown: float = 0.2
    """Share of the steps after warmup over which wsd falls."""
    clip: float | None = 1.0
    """Largest global gradient norm; longer gradients are scaled to it."""

    def __post_init__(self):
        require(self.learning_rate > 0, f"optim.learning_rate = {self.learning_rate}: must be positive")
        for knob in ("warmup", "weight_decay", "eps"):
            require(getattr(self, knob) >= 0, f"optim.{knob} = {getattr(self, knob)}: must not be negative")
        require(all(0 <= b < 1 for b in self.betas), f"optim.betas = {self.betas}: both must lie in [0, 1)")
        require(0 <= self.floor <= 1, f"optim.floor = {self.floor}: must lie in [0, 1]")
        require(0 < self.cooldown <= 1, f"optim.cooldown = {self.cooldown}: must lie in (0, 1]")
        require(self.clip is None or self.clip > 0, f"optim.clip = {self.clip}: must be positive, or None for no clipping")


@dataclass(frozen=True)
class Train:
    """The loop."""

    steps: int = 300
    """Updates. 0: measure the initial model (held-out loss, probe batch) and stop."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    z_loss: float = 1e-4
    """Weight of the mean of (log Z)^2."""
    accumulate: int = 1
    """Parts into which a batch is cut, one after the other, for one update."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or whole layers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Operands of every matrix product; parameters, sums, residual stream and statistics stay float32."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run with exit status 3, or its update is skipped and counted."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """A checkpoint that cannot be written ends the run with exit status 2, or is told in one line and training goes on."""

    def __post_init__(self):
        require(self.steps >= 0, f"train.steps = {self.steps}: must not be negative")
        require(self.seed >= 0, f"train.seed = {self.seed}: must not be negative")
        require(self.z_loss >= 0, f"train.z_loss = {self.z_loss}: must not be negative")
        require(self.accumulate > 0, f"train.accumulate = {self.accumulate}: must be positive")


@dataclass(frozen=True)
class Data:
    """Text, as bytes."""

    source: str = "stdlib"
    """stdlib: the interpreter's own library; or the path of a text file, or of a folder of them."""
    batch: int = 16
    """Sequences in a batch, over all devices."""
    sequence: int = 128
    """Tokens in a sequence."""
    skip: tuple[tuple[int, int], ...] = ()
    """Pairs of a step and a number of batches: from that step on the sequence of batches is so many further along, these left out."""

    def __post_init__(self):
        require(self.batch > 0, f"data.batch = {self.batch}: must be positive")
        require(self.sequence > 0, f"data.sequence = {self.sequence}: must be positive")
        require(all(step >= 0 and batches > 0 for step, batches in self.skip),
                f"data.skip = {self.skip}: pairs of a step, not negative, and a number of batches, positive")


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis of the mesh."""

    data: int = 1
    """Copies of the model, each with its share of the batch."""
    fsdp: int = 1
    """Shares of parameters and batch (fully sharded data parallel)."""
    tensor: int = 1
    """Shares of heads, MLP width and vocabulary."""
    expert: int = 1
    """Shares of the experts of a mixture, and of the batch."""

    def __post_init__(self):
        for axis in dataclasses.fields(self):
            require(getattr(self, axis.name) > 0, f"mesh.{axis.name} = {getattr(self, axis.name)}: must be positive")


@dataclass(frozen=True)
class Instruments:
    """The stability panel."""

    every: int | None = 10
    """Steps between two panels of the training batch. None: off."""
    probe_every: int | None = 50
    """Steps between two panels of the probe batch. None: off."""
    probe_batch: int = 8
    """Sequences in the probe batch, the same held-out ones in every run over the same data."""
    rows: int = 16
    """Query rows per sequence from which logit quantiles and histograms are taken."""


@dataclass(frozen=True)
class Spikes:
    """Values far above those before them: of train/loss, train/grad_norm, train/update_rms, and the largest attention logit of a panel."""

    action: Literal["record", "skip", "stop"] | None = None
    """At a spike keep the evidence in spikes/STEP, and: go on; go on without the step's update, unless only the largest logit spikes; or
    end the run with exit status 3. None: off."""
    deviations: float = 6.0
    """Standard deviations above the mean of the values before at which a value is a spike."""
    window: int = 128
    """Values before, at most, that mean and deviation are of; nothing is judged until there are 20."""
    ring: int | None = None
    """Panels of the last steps that the evidence holds: each step then measures one on the device. None: off."""

    def __post_init__(self):
        require(self.deviations > 0, f"spikes.deviations = {self.deviations}: must be positive")
        require(self.window >= 20, f"spikes.window = {self.window}: must be at least 20")
        require(self.ring is None or self.ring > 0, f"spikes.ring = {self.ring}: must be positive, or None for off")


@dataclass(frozen=True)
class Eval:
    """Held-out loss."""

    every: int | None = 100
    """Steps between two evaluations; the first is before step 1, the last after the last step. None: only the last."""
    batches: int = 16
    """Batches in one evaluation, the same each time."""


@dataclass(frozen=True)
class Checkpoint:
    """Saving."""

    every: int | None = 100
    """Steps between two checkpoints; the last step is always saved. None: off."""
    keep: int = 3
    """Latest checkpoints kept, beside the best by held-out loss."""


@dataclass(frozen=True)
class Run:
    """Where it goes. Not part of a run's identity."""

    root: str = "runs"
    """Folder of the run directories."""
    name: str | None = None
    """Name of the run directory. None: the experiment's name and what was changed."""
    resume: bool = False
    """Continue from the newest sound checkpoint of the run directory."""
    progress: bool = True
    """Show a progress bar."""
    compilation_cache: str | None = "~/.cache/normscope"
    """Folder of compiled programs. None: off."""

    def __post_init__(self):
        require(self.name is None or (self.name not in ("", ".", "..") and "/" not in self.name and len(self.name) <= 255),
                f"run.name = {self.name!r}: must name one folder, in run.root")


@dataclass(frozen=True)
class Start:
    """Where the first parameters come from."""

    from_: str | None = None
    """A run directory or a Hugging Face directory: its model, and its values in place of drawn ones. A QK-norm may be added to it. None:
    drawn by model.init."""


@dataclass(frozen=True)
class Experiment:
    """One training run."""

    model: Model = Model()
    init: Start = Start()
    optim: Optim = Optim()
    train: Train = Train()
    data: Data = Data()
    mesh: Mesh = Mesh()
    instruments: Instruments = Instruments()
    spikes: Spikes = Spikes()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()

    def __post_init__(self):
        check_values(flatten(self))
        for section in (self.instruments, self.eval, self.checkpoint):
            for knob in dataclasses.fields(section):
                value = getattr(section, knob.name)
                require(value is None or value > 0,
                        f"{type(section).__name__.lower()}.{knob.name} = {value}: must be positive"
                        + (", or None for off" if type(None) in get_args(knob.type) else ""))
        require(self.optim.warmup < self.train.steps or self.train.steps <= 1,
                f"optim.warmup = {self.optim.warmup}: must be below train.steps = {self.train.steps}")
        require(self.data.batch % self.train.accumulate == 0,
                f"train.accumulate = {self.train.accumulate}: must divide data.batch = {self.data.batch}")
        part, shares = self.data.batch // self.train.accumulate, self.mesh.data * self.mesh.fsdp * self.mesh.expert
        require(part % shares == 0,
                f"mesh.data x mesh.fsdp x mesh.expert = {shares}: must divide a part of the batch, data.batch / train.accumulate = {part}")
        require(self.instruments.probe_every is None or self.instruments.probe_batch % shares == 0,
                f"instruments.probe_batch = {self.instruments.probe_batch}: mesh.data x mesh.fsdp x mesh.expert = {shares} must divide it")
        require(self.model.vocab >= 256,
                f"model.vocab = {self.model.vocab}: text is read as bytes, so it must be at least 256")
        require(self.model.width % self.mesh.fsdp == 0,
                f"mesh.fsdp = {self.mesh.fsdp}: must divide model.width = {self.model.width}")
        require(not self.model.learned_positions or self.data.sequence <= self.model.context,
                f"data.sequence = {self.data.sequence}: must not be above the learned positions, model.context = {self.model.context}")
        for index, layer in enumerate(self.model.layers):
            own = layer.moe.experts is not None and layer.moe.width is not None
            hidden = ("moe.width", layer.moe.width) if own else ("mlp.width", layer.mlp.width)
            for knob, size in (("attention.heads", layer.attention.heads), hidden):
                require(size % self.mesh.tensor == 0,
                        f"mesh.tensor = {self.mesh.tensor}: must divide model.{knob} = {size} of layer {index}")
            require((layer.moe.experts or 0) % self.mesh.expert == 0,
                    f"mesh.expert = {self.mesh.expert}: must divide model.moe.experts = {layer.moe.experts} of layer {index}")
        require(self.mesh.expert == 1 or self.model.mixture,
                f"mesh.expert = {self.mesh.expert}: no layer is a mixture of experts; use mesh.data or set model.moe.experts")

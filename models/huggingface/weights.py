"""Rows between the tensors of a checkpoint and our parameters, each read in both directions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from configs.load import UserError
from models.parameters import Row as Parameter

BLOCK = 256


def copy_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """target [i, o] = source [o, i]^T, a block of rows at a time: five times as fast as one strided copy."""
    for start in range(0, source.shape[0], BLOCK):
        target[:, start : start + BLOCK] = source[start : start + BLOCK].T


def copy(target: np.ndarray, source: np.ndarray) -> None:
    target[...] = source


@dataclass(frozen=True)
class Form:
    """A row of FORMS: how a tensor lies in a checkpoint.

    `matrix`: as two dimensions [in, out] (else as it is, or flat); `turned`: its two dimensions stand as [out, in]; `axis`: the axis along
    which fused tensors are joined.
    """

    matrix: bool
    turned: bool = False
    flat: bool = False
    axis: int = -1


FORMS = {
    "linear": Form(matrix=True, turned=True, axis=0),  # torch.nn.Linear
    "conv1d": Form(matrix=True),  # GPT-2: [in, out]
    "flat": Form(matrix=False, flat=True),  # gains and biases: one dimension
    "same": Form(matrix=False),  # as ours
}


@dataclass(frozen=True)
class Weight:
    """One tensor (of each layer, of each expert: `name` has {layer} and {expert}) and the parameters it holds, by their path in the layer.

    Several paths lie one behind the other along the output axis of the form, or alternate on the last axis where `interleaved`.
    """

    name: str
    paths: tuple[str, ...]
    form: str = "linear"
    interleaved: bool = False

    def parts(self, tensor: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
        """The part of the tensor that each path has; `sizes`: their outputs."""
        if len(self.paths) == 1:
            yield tensor
            return
        axis = FORMS[self.form].axis
        if self.interleaved:
            yield from (tensor[..., index :: len(self.paths)] for index in range(len(self.paths)))
        else:
            yield from np.split(tensor, np.cumsum(sizes)[:-1], axis)

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """The inverse of `parts`."""
        if len(parts) == 1:
            return parts[0]
        if self.interleaved:
            return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        return np.concatenate(parts, FORMS[self.form].axis)


def fill(target: np.ndarray, tensor: np.ndarray, form: str, fan: tuple[int, int] | None, name: str) -> None:
    """Writes a tensor into (the layer's part of) a parameter. Raises UserError where its shape is another."""
    of, view = FORMS[form], viewed(target, form, fan)
    expected = view.shape[::-1] if of.turned else view.shape
    if tensor.shape != expected:
        raise UserError(f"{name}: has shape {tensor.shape}; the config asks for {expected}")
    write: Callable = copy_transposed if of.turned else copy
    write(view, tensor)


def lay_out(part: np.ndarray, form: str, fan: tuple[int, int] | None) -> np.ndarray:
    """The inverse of `fill`: (the layer's part of) a parameter as the checkpoint's tensor."""
    view = viewed(part, form, fan)
    return view.T if FORMS[form].turned else view


def viewed(part: np.ndarray, form: str, fan: tuple[int, int] | None) -> np.ndarray:
    """(The layer's part of) a parameter with the dimensions of its form."""
    of = FORMS[form]
    return part.reshape(fan) if of.matrix else part.reshape(-1) if of.flat else part


def outputs(parameter: Parameter, form: str) -> int:
    """The size of (one layer of) a parameter along the axis on which its form joins tensors."""
    of, shape = FORMS[form], parameter.part_shape
    return parameter.fan[1] if of.matrix else int(np.prod(shape)) if of.flat else shape[of.axis]

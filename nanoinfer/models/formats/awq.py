"""AWQ checkpoints, in the "gemm" form: integers of 4 bits, a scale and a zero point for each output and group of inputs.

    weight[out, in] = scales[g, out] * (integer[in, out] - zero[g, out]),  g = in // group_size

    qweight  int32 [in, out / 8]      eight outputs of one input in a word
    qzeros   int32 [groups, out / 8]  the same
    scales   fp16  [groups, out]

The 4-bit fields of a word, lowest first, are its outputs 0, 2, 4, 6, 1, 3, 5, 7.

Source: Lin et al. 2023, https://arxiv.org/abs/2306.00978, and awq/utils/packing_utils.py of
https://github.com/casper-hansen/AutoAWQ.
"""

import torch
from torch import Tensor

from nanoinfer.models.formats.packed import FLOATS, Fields, IntegerWeights, ceil_div, require, unpack_words

_FIELD_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


class AWQWeights(IntegerWeights):
    bits = 4
    parts = ("qweight", "qzeros", "scales")

    def read_settings(self) -> None:
        self.setting("bits", (4,))
        self._group_size: int = self.setting("group_size", (-1, 16, 32, 64, 128, 256, 512, 1024))
        self.setting("zero_point", (True,))
        name = "version" if "version" in self._settings else "format"
        spelled = {name: str(self._settings.get(name, "gemm")).lower()}  # also GEMM
        require(spelled, name, ("gemm",), self._config_path)

    def shape_of(self, layer: str) -> tuple[int, int]:
        num_inputs, num_words = self.part(layer, "qweight", ("I32",), None, None).shape
        num_groups = 1 if self._group_size == -1 else ceil_div(num_inputs, self._group_size)
        self.part(layer, "qzeros", ("I32",), num_groups, num_words)
        self.part(layer, "scales", FLOATS, num_groups, num_words * 8)
        return num_words * 8, num_inputs

    def fields(self, layer: str, rows: slice) -> Fields:
        num_outputs, num_inputs = self._shapes[layer]
        start, stop, _ = rows.indices(num_outputs)
        words = slice(start // 8, ceil_div(stop, 8))
        rows = slice(start - words.start * 8, stop - words.start * 8)
        scales = self.files.read(layer + "scales").float()[:, start:stop]
        zeros = _outputs(self.files.read(layer + "qzeros")[:, words])[:, rows]
        integers = _outputs(self.files.read(layer + "qweight")[:, words])[:, rows]
        groups = torch.arange(num_inputs) // (num_inputs if self._group_size == -1 else self._group_size)
        return Fields(integers.T, scales.T, zeros.T, groups)


def _outputs(words: Tensor) -> Tensor:
    """[n, words] -> [n, words * 8], the fields in the order of the outputs."""
    return unpack_words(words, 4)[..., _FIELD_OF_OUTPUT].flatten(1)

"""GPTQ checkpoints: integers of 4 or 8 bits, a scale and a zero point for each output and group of inputs.

    weight[out, in] = scales[g, out] * (integer[in, out] - zero[g, out]),  g = g_idx[in], or in // group_size

    qweight  int32 [in * bits / 32, out]      consecutive inputs of one output, lowest bits first
    qzeros   int32 [groups, out * bits / 32]  consecutive outputs. The format "gptq" stores zero - 1, "gptq_v2" stores zero
    scales   fp16  [groups, out]
    g_idx    int32 [in]                       with desc_act the groups are not in the inputs' order

Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, and the files as AutoGPTQ writes them (qlinear_cuda.py of
https://github.com/AutoGPTQ/AutoGPTQ).
"""

from nanoinfer.models.formats.packed import FLOATS, Fields, IntegerWeights, ceil_div, unpack_words


class GPTQWeights(IntegerWeights):
    parts = ("qweight", "qzeros", "scales", "g_idx")
    has_empty_biases = True  # AutoGPTQ writes a bias of zeros for a layer that has none

    def read_settings(self) -> None:
        self.bits = self.setting("bits", (4, 8))
        self._group_size: int = self.setting("group_size", (-1, 16, 32, 64, 128, 256, 512, 1024))
        self.setting("pack_dtype", ("int32",), "int32")
        self.setting("dynamic", (None, {}))  # different bits for some layers
        name = "checkpoint_format" if "checkpoint_format" in self._settings else "format"
        self._stored_zero = 1 if self.setting(name, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0

    def shape_of(self, layer: str) -> tuple[int, int]:
        per_word = 32 // self.bits
        num_words, num_outputs = self.part(layer, "qweight", ("I32",), None, None).shape
        num_inputs = num_words * per_word
        num_groups = 1 if self._group_size == -1 else ceil_div(num_inputs, self._group_size)
        self.part(layer, "qzeros", ("I32",), num_groups, num_outputs // per_word)
        self.part(layer, "scales", FLOATS, num_groups, num_outputs)
        if layer + "g_idx" in self.files:
            self.part(layer, "g_idx", ("I32",), num_inputs)
        return num_outputs, num_inputs

    def fields(self, layer: str, rows: slice) -> Fields:
        _, num_inputs = self._shapes[layer]
        scales = self.files.read(layer + "scales").float()[:, rows]
        zeros = unpack_words(self.files.read(layer + "qzeros"), self.bits).flatten(1)[:, rows] + self._stored_zero
        words = self.files.read(layer + "qweight")[:, rows]
        integers = unpack_words(words, self.bits).transpose(1, 2).flatten(0, 1)  # [in, rows]
        group_size = num_inputs if self._group_size == -1 else self._group_size
        groups = self.group_of_inputs(layer, "g_idx", num_inputs, len(scales), group_size)
        return Fields(integers.T, scales.T, zeros.T, groups)

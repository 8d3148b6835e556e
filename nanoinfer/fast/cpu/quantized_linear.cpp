// A linear layer with weights in 8 or 4 bits: out = residual + factor * activation(x @ weight.T + bias). quantized.py lays
// out and explains its arrays.
//
// Each row of x is first rounded to integers in -127 .. 127, with a scale per group of inputs. The products of a group are then
// sums of integers, which are exact in any order. The groups are added in fp32, one after the other. So the bits of a row do not
// depend on the number of rows, whichever instructions add the integers.

constexpr int LANES = 16;
#include <omp.h>

#include "activations.h"
#include "program.h"

struct QuantizedLinearCall {
  Slice x, factor, residual, out;  // out may be factor or residual
  int64_t scratch;        // an array of the batch: the rounded rows
  const uint8_t* weight;  // 8 bits: [N / TILE, K / 4, TILE, 4], 4 bits: [N / TILE, K / 8, TILE, 4], inputs 0-3 in the low halves
  const float* scales;    // [N / TILE, K / group, TILE]
  const uint8_t* zeros;   // [N / TILE, K / group, TILE]: the integers that stand for 0
  const float* bias;      // [N] or null
  int64_t num_out, num_in, group, bits, activation;
};

namespace {

constexpr int TILE = 32;  // outputs that are computed together, and lie together in memory
constexpr int FETCH_AHEAD = 4096;  // bytes
constexpr int MOST_ROWS = 8;  // rows that are computed together, so that a weight is loaded once for all of them

typedef uint8_t Bytes __attribute__((vector_size(16)));

template <typename Vector, typename Element>
Vector vector_at(const Element* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

float widened(Number number) {
  const uint32_t bits = uint32_t(number) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// sum[i] + the four unsigned bytes of weights[i] times the four signed bytes of x
inline Ints add_products(Ints sum, Ints weights, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  const __m256i bytes = _mm256_set1_epi32(x), low = _mm256_set1_epi32(0x00ff00ff);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
  __m256i halves[2], of[2];
  std::memcpy(halves, &sum, sizeof sum);
  std::memcpy(of, &weights, sizeof weights);
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm256_add_epi32(halves[i], _mm256_madd_epi16(_mm256_and_si256(of[i], low), even));
    halves[i] = _mm256_add_epi32(halves[i], _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(of[i], 8), low), odd));
  }
  std::memcpy(&sum, halves, sizeof sum);
  return sum;
#else
  for (int byte = 0; byte < 4; ++byte) sum += ((weights >> (8 * byte)) & 0xff) * int32_t(int8_t(x >> (8 * byte)));
  return sum;
#endif
}

// The rounded rows.
struct Rows {
  int8_t* integers;  // [num_rows, K]
  float* scales;     // [num_rows, K / group]
  int32_t* sums;     // [num_rows, K / group], of the integers
};

int32_t nearest(float value) {  // integer, of a value below 2^22: added to 1.5 * 2^23, it is in the low bits
  const float shifted = value + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4b400000;
}

void quantize(const Number* x, int group, int8_t* integers, float* scale, int32_t* sum) {
  uint32_t largest = 0;  // as bits, so that NaN is larger than any number
  for (int k = 0; k < group; ++k) largest = std::max(largest, uint32_t(x[k] & 0x7fff));
  const float limit = widened(uint16_t(largest)), factor = limit > 0 ? 127 / limit : 0;
  *scale = limit / 127;
  int32_t total = 0;
  for (int k = 0; k < group; ++k) {
    integers[k] = int8_t(nearest(widened(x[k]) * factor));
    total += integers[k];
  }
  *sum = total;
}

// Outputs of one tile for NUM rows.
template <int NUM, int BITS>
void compute(const QuantizedLinearCall& layer, const Batch& batch, int tile, const Rows& rows, int first) {
  const int num_in = layer.num_in, group = layer.group, num_groups = num_in / group;
  const uint8_t* weight = layer.weight + size_t(tile) * TILE * num_in * BITS / 8;
  const int8_t* x = rows.integers + size_t(first) * num_in;
  Floats total[NUM][2] = {};
  for (int g = 0; g < num_groups; ++g) {
    const size_t at = (size_t(tile) * num_groups + g) * TILE;
    Ints dot[NUM][2];
    for (int half = 0; half < 2; ++half) {
      const Ints zero = __builtin_convertvector(vector_at<Bytes>(layer.zeros + at + half * 16), Ints);
      for (int row = 0; row < NUM; ++row) dot[row][half] = zero * -rows.sums[size_t(first + row) * num_groups + g];
    }
    for (int k = g * group; k < (g + 1) * group; k += 32 / BITS) {
      for (int half = 0; half < 2; ++half) {
        if (NUM == 1) __builtin_prefetch(weight + FETCH_AHEAD + half * 64, 0, STREAMED);  // as in vectors.h
        const Ints packed = vector_at<Ints>(weight + half * 64);
        if (BITS == 8) {
          for (int row = 0; row < NUM; ++row) dot[row][half] = add_products(dot[row][half], packed, vector_at<int32_t>(x + row * num_in + k));
        } else {
          const Ints low = packed & 0x0f0f0f0f, high = (packed >> 4) & 0x0f0f0f0f;
          for (int row = 0; row < NUM; ++row) {
            dot[row][half] = add_products(dot[row][half], low, vector_at<int32_t>(x + row * num_in + k));
            dot[row][half] = add_products(dot[row][half], high, vector_at<int32_t>(x + row * num_in + k + 4));
          }
        }
      }
      weight += 2 * 64;
    }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = vector_at<Floats>(layer.scales + at + half * 16);
      for (int row = 0; row < NUM; ++row)
        total[row][half] += __builtin_convertvector(dot[row][half], Floats) * rows.scales[size_t(first + row) * num_groups + g] * scale;
    }
  }
  for (int row = 0; row < NUM; ++row) {
    const Number* factor = layer.factor.row<Number>(batch, first + row);
    const Number* residual = layer.residual.row<Number>(batch, first + row);
    Number* out = layer.out.row<Number>(batch, first + row);
    for (int half = 0; half < 2; ++half) {
      const int64_t start = tile * TILE + half * LANES;
      const int num = std::clamp<int64_t>(layer.num_out - start, 0, LANES);
      Floats result = total[row][half];
      for (int i = 0; layer.bias && i < num; ++i) result[i] += layer.bias[start + i];
      result = activated(result, layer.activation);
      if (factor) result *= load(factor + start, num);
      if (residual) result += load(residual + start, num);
      store(out + start, result, num);
    }
  }
}

template <int BITS>
void compute_rows(const QuantizedLinearCall& layer, const Batch& batch, int tile, const Rows& rows) {
  const int num_rows = batch.num_rows;
  int row = 0;
  for (; row + MOST_ROWS <= num_rows; row += MOST_ROWS) compute<MOST_ROWS, BITS>(layer, batch, tile, rows, row);
  if (num_rows - row >= 4) compute<4, BITS>(layer, batch, tile, rows, row), row += 4;
  if (num_rows - row >= 2) compute<2, BITS>(layer, batch, tile, rows, row), row += 2;
  if (num_rows - row >= 1) compute<1, BITS>(layer, batch, tile, rows, row);
}

}  // namespace

extern "C" const int64_t sizeof_QuantizedLinearCall = sizeof(QuantizedLinearCall);

extern "C" void linear(const QuantizedLinearCall* call, const Batch& batch) {
  const QuantizedLinearCall& layer = *call;
  const int64_t num_rows = batch.num_rows, num_groups = layer.num_in / layer.group;
  const int64_t num_tiles = (layer.num_out + TILE - 1) / TILE;
  int8_t* integers = static_cast<int8_t*>(batch.arrays[layer.scratch]);
  float* scales = (float*)(integers + num_rows * layer.num_in);
  const Rows rows{integers, scales, (int32_t*)(scales + num_rows * num_groups)};
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < num_rows * num_groups; ++i) {
    const Number* x = layer.x.row<Number>(batch, i / num_groups) + i % num_groups * layer.group;
    quantize(x, layer.group, rows.integers + i * layer.group, &rows.scales[i], &rows.sums[i]);
  }
  batch.barrier->wait(omp_get_num_threads());
#pragma omp for schedule(static) nowait
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    if (layer.bits == 8)
      compute_rows<8>(layer, batch, tile, rows);
    else
      compute_rows<4>(layer, batch, tile, rows);
  }
}

// A linear layer with weights in 8 or 4 bits: out = residual + x @ weight.T + bias. cpu_quantized.py lays out and explains its arrays.
//
// Each row of x is first rounded to integers in -127 .. 127, with a scale per group of inputs. The products of a group are then
// sums of integers, which are exact in any order. The groups are added in fp32, one after the other. So the bits of a row do not
// depend on the number of rows, whichever instructions add the integers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int TILE = 32;  // outputs that are computed together, and lie together in memory
constexpr int MOST_ROWS = 8;  // rows that are computed together, so that a weight is loaded once for all of them

typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <typename Vector, typename Element>
Vector load(const Element* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

float widened(uint16_t bfloat16) {
  const uint32_t bits = uint32_t(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t rounded(float value) {  // to bfloat16, to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
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

struct Layer {
  const uint8_t* weight;  // 8 bits: [N / TILE, K / 4, TILE, 4], 4 bits: [N / TILE, K / 8, TILE, 4], inputs 0-3 in the low halves
  const float* scales;    // [N / TILE, K / group, TILE]
  const uint8_t* zeros;   // [N / TILE, K / group, TILE]: the integers that stand for 0
  const float* bias;      // [N] or null
  int num_out, num_in, group;
};

struct Rows {
  std::vector<int8_t> integers;  // [rows, K]
  std::vector<float> scales;     // [rows, K / group]
  std::vector<int32_t> sums;     // [rows, K / group], of the integers
};

int32_t nearest(float value) {  // integer, of a value below 2^22: added to 1.5 * 2^23, it is in the low bits
  const float shifted = value + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4b400000;
}

void quantize(const uint16_t* x, int group, int8_t* integers, float* scale, int32_t* sum) {
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
void compute(const Layer& layer, int tile, const Rows& rows, int first, const uint16_t* residual, uint16_t* out) {
  const int num_in = layer.num_in, group = layer.group, num_groups = num_in / group;
  const uint8_t* weight = layer.weight + size_t(tile) * TILE * num_in * BITS / 8;
  const int8_t* x = rows.integers.data() + size_t(first) * num_in;
  Floats total[NUM][2] = {};
  for (int g = 0; g < num_groups; ++g) {
    const size_t at = (size_t(tile) * num_groups + g) * TILE;
    Ints dot[NUM][2];
    for (int half = 0; half < 2; ++half) {
      const Ints zero = __builtin_convertvector(load<Bytes>(layer.zeros + at + half * 16), Ints);
      for (int row = 0; row < NUM; ++row) dot[row][half] = zero * -rows.sums[size_t(first + row) * num_groups + g];
    }
    for (int k = g * group; k < (g + 1) * group; k += 32 / BITS) {
      for (int half = 0; half < 2; ++half) {
        const Ints packed = load<Ints>(weight + half * 64);
        if (BITS == 8) {
          for (int row = 0; row < NUM; ++row) dot[row][half] = add_products(dot[row][half], packed, load<int32_t>(x + row * num_in + k));
        } else {
          const Ints low = packed & 0x0f0f0f0f, high = (packed >> 4) & 0x0f0f0f0f;
          for (int row = 0; row < NUM; ++row) {
            dot[row][half] = add_products(dot[row][half], low, load<int32_t>(x + row * num_in + k));
            dot[row][half] = add_products(dot[row][half], high, load<int32_t>(x + row * num_in + k + 4));
          }
        }
      }
      weight += 2 * 64;
    }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load<Floats>(layer.scales + at + half * 16);
      for (int row = 0; row < NUM; ++row)
        total[row][half] += __builtin_convertvector(dot[row][half], Floats) * rows.scales[size_t(first + row) * num_groups + g] * scale;
    }
  }
  const int start = tile * TILE, num = std::min(TILE, layer.num_out - start);
  for (int row = 0; row < NUM; ++row) {
    float sums[TILE];
    std::memcpy(sums, total[row], sizeof sums);
    const size_t at = size_t(first + row) * layer.num_out + start;
    for (int i = 0; i < num; ++i) {
      float sum = sums[i];
      if (layer.bias) sum += layer.bias[start + i];
      if (residual) sum += widened(residual[at + i]);
      out[at + i] = rounded(sum);
    }
  }
}

template <int BITS>
void compute_rows(const Layer& layer, int tile, const Rows& rows, int num_rows, const uint16_t* residual, uint16_t* out) {
  int row = 0;
  for (; row + MOST_ROWS <= num_rows; row += MOST_ROWS) compute<MOST_ROWS, BITS>(layer, tile, rows, row, residual, out);
  if (num_rows - row >= 4) compute<4, BITS>(layer, tile, rows, row, residual, out), row += 4;
  if (num_rows - row >= 2) compute<2, BITS>(layer, tile, rows, row, residual, out), row += 2;
  if (num_rows - row >= 1) compute<1, BITS>(layer, tile, rows, row, residual, out);
}

}  // namespace

// x, residual (or null), out: bfloat16, [num_rows, num_in or num_out]
extern "C" void quantized_linear(
    const uint16_t* x, const uint16_t* residual, uint16_t* out, const uint8_t* weight, const float* scales, const uint8_t* zeros,
    const float* bias, int num_rows, int num_out, int num_in, int group, int bits, int num_threads) {
  const Layer layer{weight, scales, zeros, bias, num_out, num_in, group};
  const int num_groups = num_in / group, num_tiles = (num_out + TILE - 1) / TILE;
  static thread_local Rows kept;  // kept, because allocating and touching memory takes as long as the products of a row
  Rows& rows = kept;
  rows.integers.resize(size_t(num_rows) * num_in);
  rows.scales.resize(size_t(num_rows) * num_groups);
  rows.sums.resize(size_t(num_rows) * num_groups);
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(static)
    for (int i = 0; i < num_rows * num_groups; ++i) {
      const size_t at = size_t(i) * group;
      quantize(x + at, group, rows.integers.data() + at, &rows.scales[i], &rows.sums[i]);
    }
#pragma omp for schedule(static)
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (bits == 8)
        compute_rows<8>(layer, tile, rows, num_rows, residual, out);
      else
        compute_rows<4>(layer, tile, rows, num_rows, residual, out);
    }
  }
}

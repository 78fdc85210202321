// Matrix multiplication of float32 rows with weights of a byte each, int8 or fp8: x [M, K] times
// w [N, K] transposed, summed in float32.
//
// A few rows are the business of few_rows.h. For more, a block of w, some columns by some depth, is
// widened and transposed into a buffer that stays in the second-level cache, so that a vector holds
// neighbouring columns; then all rows of x pass by in tiles of kTall rows by two vectors, whose sums
// stay in registers.
#pragma once

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "few_rows.h"
#include "vec.h"

namespace compilepass {

constexpr int64_t kPanel = 2 * kLanes;  // columns of a tile
constexpr int kTall = kLanes == 16 ? 12 : 6;
constexpr int64_t kDepth = 256;  // lanes of x and of a panel along the sum
constexpr int64_t kPanels = 128 / kPanel;
constexpr int64_t kAtOnce = 16;  // the side of the square of bytes that is transposed

typedef uint8_t Bytes __attribute__((vector_size(kAtOnce)));

// Interleaving row i with row i + 8, four times, transposes 16 x 16.
COMPILEPASS_INLINE void transpose(Bytes (&rows)[kAtOnce]) {
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    Bytes next[kAtOnce];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shufflevector(
          rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(
          rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kAtOnce; ++i) rows[i] = next[i];
  }
}

// The first kLanes bytes, each as an integer of a lane.
COMPILEPASS_INLINE BitVec widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (BitVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (BitVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  BitVec v;
  for (int64_t i = 0; i < kLanes; ++i) v[i] = from[i];
  return v;
#endif
}

// Bytes of a row, 0 past its end.
COMPILEPASS_INLINE BitVec load_bytes(const uint8_t* from, Whole) { return widen_bytes(from); }
COMPILEPASS_INLINE BitVec load_bytes(const uint8_t* from, Rest part) {
  uint8_t bytes[kAtOnce] = {};
  std::memcpy(bytes, from, part.count);
  return widen_bytes(bytes);
}

// Weights of a byte each. Up to kFewest rows it is faster to widen them where they lie, once for
// every kFew rows, than to transpose them.
struct Int8Weight {
  static constexpr int64_t kFewest = 6 * kFew;
  template <class Part>
  static COMPILEPASS_INLINE Vec load(const uint8_t* from, Part part) {
    return widen(load_bytes(from, part));
  }
#if defined(__AVX512F__)
  static COMPILEPASS_INLINE Vec load(const uint8_t* from, Whole) {
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  }
#elif defined(__AVX2__)
  static COMPILEPASS_INLINE Vec load(const uint8_t* from, Whole) {
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
  }
#endif
  static COMPILEPASS_INLINE Vec widen(BitVec byte) {
    const IntVec number = bit_cast<IntVec>(byte << 24) >> 24;
    return __builtin_convertvector(number, Vec);
  }
};
struct Fp8Weight {
  static constexpr int64_t kFewest = 2 * kFew;  // more work a weight
  template <class Part>
  static COMPILEPASS_INLINE Vec load(const uint8_t* from, Part part) {
    return widen(load_bytes(from, part));
  }
  static COMPILEPASS_INLINE Vec widen(BitVec byte) {
    const BitVec magnitude = byte & 0x7fu;
    const Vec small = __builtin_convertvector(bit_cast<IntVec>(magnitude), Vec) * 0x1p-9f;
    const Vec large = bit_cast<Vec>((magnitude << 20) + (120u << 23));
    Vec v = magnitude < 8u ? small : large;
    v = magnitude == 0x7fu ? splat(__builtin_nanf("")) : v;
    return bit_cast<Vec>(bit_cast<BitVec>(v) | ((byte & 0x80u) << 24));
  }
};

// How factors lie in a lane of a panel and of x: one float.
struct Singly {
  static constexpr int64_t kTogether = 1;
  static COMPILEPASS_INLINE void lay_out(const float* x, int64_t count, float* to) {
    std::copy_n(x, count, to);
  }
  static COMPILEPASS_INLINE Vec joined(const Vec (&factors)[1]) { return factors[0]; }
  static COMPILEPASS_INLINE Vec step(Vec sum, const float* x, Vec w) {
    const Vec value = *x - Vec{};  // in every lane; `splat` is an addition
    return sum + value * w;
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
// Or two neighbours along the sum, of a kind that bfloat16 holds exactly: twice as many products a
// step. Those below the smallest normal number count as 0.
struct InPairs {
  static constexpr int64_t kTogether = 2;
  static COMPILEPASS_INLINE void lay_out(const float* x, int64_t count, float* to) {
    int64_t k = 0;
    for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
      const Vec low = load(x + k, Whole{}), high = load(x + k + kLanes, Whole{});
      const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(to + k / 2, &pairs, sizeof(pairs));
    }
    for (; k < count; k += 2) {
      const uint32_t low = bit_cast<uint32_t>(x[k]) >> 16;
      const uint32_t high = k + 1 < count ? bit_cast<uint32_t>(x[k + 1]) & 0xffff0000u : 0;
      to[k / 2] = bit_cast<float>(low | high);
    }
  }
  static COMPILEPASS_INLINE Vec joined(const Vec (&factors)[2]) {
    return bit_cast<Vec>((bit_cast<BitVec>(factors[0]) >> 16) | bit_cast<BitVec>(factors[1]));
  }
  static COMPILEPASS_INLINE Vec step(Vec sum, const float* x, Vec w) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
  }
};
#else
using InPairs = Singly;
#endif

// `columns` rows of w, `depth` elements of each, as lanes [depth / kTogether][kPanel]; 0 for columns
// that lack.
template <class Weight, class Factors>
void pack(const uint8_t* w, int64_t width, int64_t columns, int64_t depth, float* to) {
  constexpr int64_t together = Factors::kTogether;
  for (int64_t c = 0; c < kPanel; c += kAtOnce) {
    const int64_t rows = std::clamp<int64_t>(columns - c, 0, kAtOnce);
    for (int64_t k = 0; k < depth; k += kAtOnce) {
      const int64_t count = std::min(kAtOnce, depth - k);
      Bytes block[kAtOnce] = {};
      const uint8_t* from = w + c * width + k;
      if (rows == kAtOnce && count == kAtOnce) {
        for (int i = 0; i < kAtOnce; ++i) std::memcpy(&block[i], from + i * width, kAtOnce);
      } else {
        for (int i = 0; i < rows; ++i) std::memcpy(&block[i], from + i * width, count);
      }
      transpose(block);
      for (int64_t i = 0; i < count; i += together) {
        for (int64_t part = 0; part < kAtOnce; part += kLanes) {
          Vec factors[together];
          for (int64_t j = 0; j < together; ++j) {
            uint8_t bytes[kAtOnce];
            std::memcpy(bytes, &block[i + j], kAtOnce);
            factors[j] = Weight::widen(widen_bytes(bytes + part));
          }
          const Vec v = Factors::joined(factors);
          std::memcpy(to + (k + i) / together * kPanel + c + part, &v, sizeof(v));
        }
      }
    }
  }
}

// sums += R rows of x times a panel, in so many steps. The rows lie kDepth apart: at a distance of
// their own, a power of two, they would drive each other out of the cache.
template <class Factors, int R>
void panel_tile(const float* x, const float* panel, int64_t steps, float* sums, int64_t stride) {
  Vec left[R], right[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    left[r] = load(sums + r * stride, Whole{});
    right[r] = load(sums + r * stride + kLanes, Whole{});
  }
  for (int64_t k = 0; k < steps; ++k) {
    const Vec first = load(panel + k * kPanel, Whole{});
    const Vec second = load(panel + k * kPanel + kLanes, Whole{});
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      left[r] = Factors::step(left[r], x + r * kDepth + k, first);
      right[r] = Factors::step(right[r], x + r * kDepth + k, second);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(sums + r * stride, left[r], Whole{});
    store(sums + r * stride + kLanes, right[r], Whole{});
  }
}

template <class Factors, int R>
COMPILEPASS_INLINE void panel_rows(
    int64_t rows, const float* x, const float* panel, int64_t steps, float* sums, int64_t stride) {
  if constexpr (R > 1) {
    if (rows < R) return panel_rows<Factors, R - 1>(rows, x, panel, steps, sums, stride);
  }
  panel_tile<Factors, R>(x, panel, steps, sums, stride);
}

// out = (x @ w^T) * xscale * wscale + bias; xscale (a value a row, or one for all with xstep 0) and
// bias may be null.
template <class T>
struct WidenedLinear {
  const float* x;
  const float* xscale;
  int64_t xstep;
  const uint8_t* w;
  const float* wscale;
  const float* bias;
  T* out;
  int64_t rows, width, columns;
};

// What is left to do with the sums of row r from column `at` on.
template <class T>
COMPILEPASS_INLINE void finish(
    const WidenedLinear<T>& a, int64_t r, int64_t at, int64_t columns, const float* sums) {
  const float scale = a.xscale ? a.xscale[r * a.xstep] : 1.0f;
  for_each_vec(columns, [&](int64_t c, auto part) {
    Vec v = load(sums + c, part) * scale * load(a.wscale + at + c, part);
    if (a.bias) v += load(a.bias + at + c, part);
    store(a.out + r * a.columns + at + c, plain_nan(v), part);
  });
}

template <class Weight, class T>
void multiply_few(const WidenedLinear<T>& a) {
  constexpr int64_t chunk = 32;  // rows of w, which stay in the second-level cache
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 18) / (chunk * a.width));
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    float sums[kFew * chunk];
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      for (int64_t r = 0; r < a.rows; r += kFew) {
        const int64_t rows = std::min<int64_t>(kFew, a.rows - r);
        few_rows<Weight, kFew>(
            rows, a.x + r * a.width, a.w + at * a.width, a.width, columns, sums, chunk);
        for (int64_t i = 0; i < rows; ++i) finish(a, r + i, at, columns, sums + i * chunk);
      }
    }
  });
}

template <class Weight, class Factors, class T>
void multiply_widened(const WidenedLinear<T>& a) {
  if (a.rows <= Weight::kFewest / Factors::kTogether) return multiply_few<Weight>(a);
  constexpr int64_t chunk = kPanels * kPanel, deepest = kDepth * Factors::kTogether;
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> sums(new float[a.rows * chunk]);
    const std::unique_ptr<float[]> panels(new float[kDepth * chunk]);
    float x[kTall * kDepth];
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      std::fill(sums.get(), sums.get() + a.rows * chunk, 0.0f);
      for (int64_t k = 0; k < a.width; k += deepest) {
        const int64_t depth = std::min(deepest, a.width - k);
        const int64_t steps = (depth + Factors::kTogether - 1) / Factors::kTogether;
        for (int64_t c = 0; c < columns; c += kPanel) {
          const uint8_t* from = a.w + (at + c) * a.width + k;
          pack<Weight, Factors>(from, a.width, columns - c, depth, panels.get() + c * kDepth);
        }
        for (int64_t r = 0; r < a.rows; r += kTall) {
          const int64_t rows = std::min<int64_t>(kTall, a.rows - r);
          for (int64_t i = 0; i < rows; ++i) {
            Factors::lay_out(a.x + (r + i) * a.width + k, depth, x + i * kDepth);
          }
          for (int64_t c = 0; c < columns; c += kPanel) {
            panel_rows<Factors, kTall>(
                rows, x, panels.get() + c * kDepth, steps, sums.get() + r * chunk + c, chunk);
          }
        }
      }
      for (int64_t r = 0; r < a.rows; ++r) finish(a, r, at, columns, sums.get() + r * chunk);
    }
  });
}

}  // namespace compilepass

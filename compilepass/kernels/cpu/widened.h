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
constexpr int64_t kDepth = 256, kPanels = 128 / kPanel;
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

// `columns` rows of w, `depth` elements of each, as [depth][kPanel] floats; 0 for columns that lack.
template <class Weight>
void pack(const uint8_t* w, int64_t width, int64_t columns, int64_t depth, float* to) {
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
      for (int64_t i = 0; i < count; ++i) {
        uint8_t bytes[kAtOnce];
        std::memcpy(bytes, &block[i], kAtOnce);
        for (int64_t part = 0; part < kAtOnce; part += kLanes) {
          const Vec v = Weight::widen(widen_bytes(bytes + part));
          std::memcpy(to + (k + i) * kPanel + c + part, &v, sizeof(v));
        }
      }
    }
  }
}

// sums += R rows of x times a panel. The rows lie kDepth apart: at a distance of their own, a power
// of two, they would drive each other out of the cache.
template <int R>
void panel_tile(
    const float* x, const float* panel, int64_t depth, float* sums, int64_t stride) {
  Vec left[R], right[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    left[r] = load(sums + r * stride, Whole{});
    right[r] = load(sums + r * stride + kLanes, Whole{});
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec first = load(panel + k * kPanel, Whole{});
    const Vec second = load(panel + k * kPanel + kLanes, Whole{});
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = x[r * kDepth + k] - Vec{};  // in every lane; `splat` is an addition
      left[r] += value * first;
      right[r] += value * second;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(sums + r * stride, left[r], Whole{});
    store(sums + r * stride + kLanes, right[r], Whole{});
  }
}

template <int R>
COMPILEPASS_INLINE void panel_rows(
    int64_t rows, const float* x, const float* panel, int64_t depth, float* sums, int64_t stride) {
  if constexpr (R > 1) {
    if (rows < R) return panel_rows<R - 1>(rows, x, panel, depth, sums, stride);
  }
  panel_tile<R>(x, panel, depth, sums, stride);
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

template <class Weight, class T>
void multiply_widened(const WidenedLinear<T>& a) {
  if (a.rows <= Weight::kFewest) return multiply_few<Weight>(a);
  constexpr int64_t chunk = kPanels * kPanel;
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> sums(new float[a.rows * chunk]);
    const std::unique_ptr<float[]> panels(new float[kDepth * chunk]);
    float x[kTall * kDepth];
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      std::fill(sums.get(), sums.get() + a.rows * chunk, 0.0f);
      for (int64_t k = 0; k < a.width; k += kDepth) {
        const int64_t depth = std::min(kDepth, a.width - k);
        for (int64_t c = 0; c < columns; c += kPanel) {
          const uint8_t* from = a.w + (at + c) * a.width + k;
          pack<Weight>(from, a.width, columns - c, depth, panels.get() + c * kDepth);
        }
        for (int64_t r = 0; r < a.rows; r += kTall) {
          const int64_t rows = std::min<int64_t>(kTall, a.rows - r);
          for (int64_t i = 0; i < rows; ++i) {
            std::copy_n(a.x + (r + i) * a.width + k, depth, x + i * kDepth);
          }
          for (int64_t c = 0; c < columns; c += kPanel) {
            panel_rows<kTall>(
                rows, x, panels.get() + c * kDepth, depth, sums.get() + r * chunk + c, chunk);
          }
        }
      }
      for (int64_t r = 0; r < a.rows; ++r) finish(a, r, at, columns, sums.get() + r * chunk);
    }
  });
}

}  // namespace compilepass

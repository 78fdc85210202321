// int8 matrix multiplication, x [M, K] times w [N, K] transposed, accumulated exactly in int32.
//
// oneDNN's int8 matmul is not used: without VNNI instructions it saturates in int16 and is silently
// wrong, and it needs weights repacked, whose copy can go stale. Here w is read where it lies: both
// matrices are contiguous along K, and a tile of dot products reuses each load.
#pragma once

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace compilepass {

// The widest dot product of the machine: `kStep` products added into the lanes of an IntVec.
// x is prepared as elements of type X, with kOffset added; the kernel subtracts kOffset * sum(w).
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
struct Dot {
  using X = uint8_t;
  static constexpr int64_t kStep = 64, kColumns = 4;
  static constexpr int kOffset = 128;
  using W = __m512i;
  static COMPILEPASS_INLINE W widen(const int8_t* w) { return _mm512_loadu_si512(w); }
  static COMPILEPASS_INLINE IntVec step(IntVec sum, const X* x, W w) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(x), w);
  }
};
#elif defined(__AVX512BW__)
struct Dot {
  using X = int16_t;
  static constexpr int64_t kStep = 32, kColumns = 4;
  static constexpr int kOffset = 0;
  using W = __m512i;
  static COMPILEPASS_INLINE W widen(const int8_t* w) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
  }
  static COMPILEPASS_INLINE IntVec step(IntVec sum, const X* x, W w) {
    return sum + (IntVec)_mm512_madd_epi16(_mm512_loadu_si512(x), w);
  }
};
#elif defined(__AVX2__)
struct Dot {
  using X = int16_t;
  static constexpr int64_t kStep = 16, kColumns = 2;
  static constexpr int kOffset = 0;
  using W = __m256i;
  static COMPILEPASS_INLINE W widen(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w));
  }
  static COMPILEPASS_INLINE IntVec step(IntVec sum, const X* x, W w) {
    return sum + (IntVec)_mm256_madd_epi16(_mm256_loadu_si256((const __m256i*)x), w);
  }
};
#else
struct Dot {
  using X = int32_t;
  static constexpr int64_t kStep = kLanes, kColumns = 2;
  static constexpr int kOffset = 0;
  using W = IntVec;
  static COMPILEPASS_INLINE W widen(const int8_t* w) {
    ByteVec raw;
    std::memcpy(&raw, w, sizeof(raw));
    return __builtin_convertvector(raw, IntVec);
  }
  static COMPILEPASS_INLINE IntVec step(IntVec sum, const X* x, W w) {
    IntVec values;
    std::memcpy(&values, x, sizeof(values));
    return sum + values * w;
  }
};
#endif

constexpr int64_t kTileRows = 4;

template <class Part>
COMPILEPASS_INLINE IntVec load_ints(const int32_t* from, Part part) {
  IntVec v{};
  std::memcpy(&v, from, part.count * sizeof(int32_t));
  return v;
}

// out[r][c] = dot(x row r, w row c), over R rows of x (of padded width) and C of w.
template <int R, int C>
COMPILEPASS_INLINE void tile(
    const Dot::X* x, int64_t padded, const int8_t* w, int64_t width, int32_t* out, int64_t stride) {
  IntVec sums[R][C] = {};
  const auto step = [&](int64_t k, int64_t count) {
    for (int c = 0; c < C; ++c) {
      Dot::W values;
      if (count == Dot::kStep) {
        values = Dot::widen(w + c * width + k);
      } else {
        int8_t rest[Dot::kStep] = {};
        std::memcpy(rest, w + c * width + k, count);
        values = Dot::widen(rest);
      }
      for (int r = 0; r < R; ++r) sums[r][c] = Dot::step(sums[r][c], x + r * padded + k, values);
    }
  };
  int64_t k = 0;
  for (; k + Dot::kStep <= width; k += Dot::kStep) step(k, Dot::kStep);
  if (k < width) step(k, width - k);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) out[r * stride + c] = sum(sums[r][c]);
  }
}

// R rows of x against `columns` rows of w.
template <int R>
void strip(
    const Dot::X* x, int64_t padded, const int8_t* w, int64_t width, int64_t columns, int32_t* out,
    int64_t stride) {
  int64_t c = 0;
  for (; c + Dot::kColumns <= columns; c += Dot::kColumns) {
    tile<R, Dot::kColumns>(x, padded, w + c * width, width, out + c, stride);
  }
  for (; c < columns; ++c) tile<R, 1>(x, padded, w + c * width, width, out + c, stride);
}

// The operands of out = (x @ w^T) * xscale * wscale + bias; bias may be null.
struct Int8Linear {
  const int8_t* x;
  const float* xscale;
  const int8_t* w;
  const float* wscale;
  const float* bias;
  int64_t rows, width, columns;
};

template <class T>
void multiply(const Int8Linear& a, T* out) {
  const int64_t padded = (a.width + Dot::kStep - 1) / Dot::kStep * Dot::kStep;
  const std::unique_ptr<Dot::X[]> x(new Dot::X[a.rows * padded]);
  for (int64_t r = 0; r < a.rows; ++r) {
    Dot::X* to = x.get() + r * padded;
    for (int64_t k = 0; k < a.width; ++k) to[k] = a.x[r * a.width + k] + Dot::kOffset;
    std::fill(to + a.width, to + padded, Dot::X{});
  }
  const std::unique_ptr<Dot::X[]> offsets(new Dot::X[padded]);
  std::fill(offsets.get(), offsets.get() + padded, static_cast<Dot::X>(Dot::kOffset));

  // A chunk of w that stays in the second-level cache while all of x passes by.
  const int64_t chunk = std::clamp<int64_t>((int64_t{1} << 18) / a.width, 16, 256);
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    int32_t sums[kTileRows * 256], corrections[256];
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      const int8_t* w = a.w + at * a.width;
      const auto finish = [&](int64_t first, int64_t rows) {
        for (int64_t r = 0; r < rows; ++r) {
          T* to = out + (first + r) * a.columns + at;
          const float scale = a.xscale[first + r];
          for_each_vec(columns, [&](int64_t c, auto part) {
            const IntVec exact = load_ints(sums + r * chunk + c, part) -
                load_ints(corrections + c, part);
            Vec v = __builtin_convertvector(exact, Vec) * scale * load(a.wscale + at + c, part);
            if (a.bias) v += load(a.bias + at + c, part);
            store(to + c, plain_nan(v), part);
          });
        }
      };
      strip<1>(offsets.get(), padded, w, a.width, columns, corrections, chunk);
      int64_t r = 0;
      for (; r + kTileRows <= a.rows; r += kTileRows) {
        strip<kTileRows>(x.get() + r * padded, padded, w, a.width, columns, sums, chunk);
        finish(r, kTileRows);
      }
      for (; r < a.rows; ++r) {
        strip<1>(x.get() + r * padded, padded, w, a.width, columns, sums, chunk);
        finish(r, 1);
      }
    }
  });
}

}  // namespace compilepass

// int8 matrix multiplication, x [M, K] times w [N, K] transposed, accumulated exactly in int32.
//
// oneDNN's int8 matmul is not used: without VNNI instructions it saturates in int16 and is silently
// wrong, and it needs weights repacked, whose copy can go stale. Here w is read where it lies: both
// matrices are contiguous along K, and a tile of dot products reuses each load.
#pragma once

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "quantise.h"

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

// As many as leave registers for a tile of sums and what is multiplied.
constexpr int64_t kTileRows = kLanes == 16 ? 6 : 4;

// The sums of the lanes of four vectors.
COMPILEPASS_INLINE void store_sums(int32_t* to, IntVec a, IntVec b, IntVec c, IntVec d) {
#if defined(__AVX512F__)
  const auto halves = [](IntVec x, IntVec y) {
    return (IntVec)_mm512_unpacklo_epi32((__m512i)x, (__m512i)y) +
        (IntVec)_mm512_unpackhi_epi32((__m512i)x, (__m512i)y);
  };
  const __m512i ab = (__m512i)halves(a, b), cd = (__m512i)halves(c, d);
  const __m512i all =
      (__m512i)((IntVec)_mm512_unpacklo_epi64(ab, cd) + (IntVec)_mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(
      _mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_storeu_si128(
      (__m128i*)to,
      _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#else
  const IntVec each[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) to[i] = sum(each[i]);
#endif
}

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
    int32_t* to = out + r * stride;
    if constexpr (C == 4) {
      store_sums(to, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    } else {
      for (int c = 0; c < C; ++c) to[c] = sum(sums[r][c]);
    }
  }
}

// `rows` rows of x (at most R) against `columns` rows of w.
template <int R>
void strip(
    int64_t rows, const Dot::X* x, int64_t padded, const int8_t* w, int64_t width, int64_t columns,
    int32_t* out, int64_t stride) {
  if constexpr (R > 1) {
    if (rows < R) return strip<R - 1>(rows, x, padded, w, width, columns, out, stride);
  }
  int64_t c = 0;
  for (; c + Dot::kColumns <= columns; c += Dot::kColumns) {
    tile<R, Dot::kColumns>(x, padded, w + c * width, width, out + c, stride);
  }
  for (; c < columns; ++c) tile<R, 1>(x, padded, w + c * width, width, out + c, stride);
}

// Rows of x as the dot product takes them, with a scale each. Where it takes them moved by kOffset,
// a row of kOffset alone is before them, whose product makes good for it.
struct Int8Rows {
  static constexpr int64_t kBefore = Dot::kOffset == 0 ? 0 : 1;
  int64_t rows, width, padded;
  std::unique_ptr<Dot::X[]> x;
  const float* scales;

  Int8Rows(int64_t rows, int64_t width, const float* scales)
      : rows(rows),
        width(width),
        padded((width + Dot::kStep - 1) / Dot::kStep * Dot::kStep),
        x(new Dot::X[(rows + kBefore) * padded]),
        scales(scales) {
    if (kBefore) std::fill(x.get(), x.get() + padded, static_cast<Dot::X>(Dot::kOffset));
  }

  void set(int64_t r, const int8_t* values) {
    Dot::X* to = x.get() + (kBefore + r) * padded;
    for (int64_t k = 0; k < width; ++k) to[k] = values[k] + Dot::kOffset;
    std::fill(to + width, to + padded, Dot::X{});
  }
};

// out = (x @ w^T) * scale of x * scale of w + bias, rounded to T, then residual + that; bias and
// residual may be null.
template <class T>
struct Int8Linear {
  const int8_t* w;
  const float* wscale;
  const float* bias;
  const T* residual;
  T* out;
  int64_t columns;
};

template <class T>
void multiply(const Int8Rows& x, const Int8Linear<T>& a) {
  constexpr int64_t kBefore = Int8Rows::kBefore;
  // A chunk of w that stays in the second-level cache while all of x passes by.
  const int64_t chunk = std::clamp<int64_t>((int64_t{1} << 18) / x.width, 16, 256);
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    int32_t sums[kTileRows * 256], corrections[256] = {};
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      const auto finish = [&](int64_t r, const int32_t* from) {
        const int64_t start = r * a.columns + at;
        for_each_vec(columns, [&](int64_t c, auto part) {
          const IntVec exact = load_ints(from + c, part) - load_ints(corrections + c, part);
          Vec v = __builtin_convertvector(exact, Vec) * x.scales[r] * load(a.wscale + at + c, part);
          if (a.bias) v += load(a.bias + at + c, part);
          v = plain_nan(v);
          if (a.residual) v = Storage<T>::round(v) + load(a.residual + start + c, part);
          store(a.out + start + c, v, part);
        });
      };
      for (int64_t r = 0; r < x.rows + kBefore; r += kTileRows) {
        const int64_t rows = std::min(kTileRows, x.rows + kBefore - r);
        strip<kTileRows>(
            rows, x.x.get() + r * x.padded, x.padded, a.w + at * x.width, x.width, columns, sums,
            chunk);
        if (kBefore && r == 0) std::copy(sums, sums + columns, corrections);
        for (int64_t i = r == 0 ? kBefore : 0; i < rows; ++i) {
          finish(r + i - kBefore, sums + i * chunk);
        }
      }
    }
  });
}

}  // namespace compilepass

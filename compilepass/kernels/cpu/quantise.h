// Quantised rows: what becomes of a row of values once it is computed and rounded to its type T.
//
// A sink takes a row that lies in memory, so it knows the type and the quantisation and nothing of
// what made the row: each source of rows (rows.h) is compiled once, whatever follows it.
#pragma once

#include <cmath>
#include <limits>
#include <memory>

#include "rows.h"

namespace compilepass {

// Where quantised rows go (those that a quantisation does not give are null), and its settings.
struct Quantising {
  int8_t* q;  // int8, or the bits of fp8
  float* scales = nullptr;
  int32_t* zero_points = nullptr;
  int64_t width;
  float scale = 0;
  int32_t zero_point = 0;
  int64_t group = 0;
};

// sink(quantising, row, values, the largest magnitude among them)
template <class T>
using Sink = void (*)(const Quantising&, int64_t, const T*, float);

constexpr float kSmallestRange = 1e-5f;

// NaN stays NaN.
COMPILEPASS_INLINE Vec clamped(Vec v, float least, float largest) {
  return larger(splat(least), smaller(splat(largest), v));
}

// Formats: a quotient as the nearest number of the quantised type, in the low bits of each lane.
// `bits` takes any quotient, `bits_within` one that lies in the type's range.

struct Int8 {
  static COMPILEPASS_INLINE BitVec bits(Vec v) { return bits_within(clamped(v, -128.0f, 127.0f)); }
  static COMPILEPASS_INLINE BitVec bits_within(Vec v) { return bit_cast<BitVec>(v + kRounder); }
};

// The same, moved by a zero point.
struct ShiftedInt8 {
  float zero_point;
  COMPILEPASS_INLINE BitVec bits(Vec v) const { return bits_within(clamped(v, -0x1p21f, 0x1p21f)); }
  COMPILEPASS_INLINE BitVec bits_within(Vec v) const {
    return Int8::bits(((v + kRounder) - kRounder) + zero_point);
  }
};

// float8_e4m3fn, to nearest, ties to even: below 2^-6 its steps are 2^-9, the last digit of numbers
// around 2^14; above, it is a float32 with a shorter fraction and another bias.
struct Fp8 {
  static COMPILEPASS_INLINE BitVec bits(Vec v) {
    const BitVec number = bits_within(clamped(v, -448.0f, 448.0f));
    return v == v ? number : BitVec{} + 0x7fu;
  }
  static COMPILEPASS_INLINE BitVec bits_within(Vec v) {
    const BitVec all = bit_cast<BitVec>(v), magnitude = all & 0x7fffffffu;
    const BitVec small =
        bit_cast<BitVec>(bit_cast<Vec>(magnitude) + 0x1p14f) - bit_cast<uint32_t>(0x1p14f);
    const BitVec large =
        (magnitude + ((magnitude >> 20) & 1u) + (0x7ffffu - (120u << 23))) >> 20;
    const BitVec number = magnitude < bit_cast<uint32_t>(0x1p-6f) ? small : large;
    return number | ((all >> 24) & 0x80u);
  }
};

template <class T>
COMPILEPASS_INLINE void store_quantised(int8_t* to, const auto& bits, Vec v, auto part) {
  const ByteVec raw = low_bytes((IntVec)bits(v));
  std::memcpy(to, &raw, part.count);
}
template <class T>
COMPILEPASS_INLINE void store_quantised(int8_t* to, const auto& bits, Two v, Twice) {
  constexpr bool kInTurn = std::is_same_v<T, BFloat16>;
  const HalfVec raw = low_bytes<kInTurn>((IntVec)bits(v.a), (IntVec)bits(v.b));
  std::memcpy(to, &raw, sizeof(raw));
}

// Stores values / scale; `Within` says that the quotients lie in the format's range, as they do with
// a scale that was taken from the values.
template <bool Within, class T, class Format>
void store_row(int8_t* to, const T* values, int64_t count, float scale, const Format& format) {
  const auto each_as = [&](auto bits_of) __attribute__((always_inline)) {
    for_each_two(count, [&](int64_t i, auto part) {
      store_quantised<T>(to + i, bits_of, load(values + i, part), part);
    });
  };
  const float inverse = 1.0f / scale, limit = 0x1p21f * scale;
  if (!(scale > 1e-25f && scale < 1e25f)) {
    each_as([&](Vec v) { return format.bits(v / scale); });
  } else if constexpr (Within) {
    each_as([&](Vec v) { return format.bits_within(divided(v, scale, inverse)); });
  } else {  // a quotient must not overflow
    each_as([&](Vec v) {
      return format.bits(divided(clamped(v, -limit, limit), scale, inverse));
    });
  }
}

// The largest magnitude of a row, NaN above all.
template <class T>
float largest_of(const T* values, int64_t count) {
  AbsMax<T> largest;
  for_each_two(count, [&](int64_t i, auto part) { largest.add(values + i, part); });
  return largest.value();
}

inline float scale_of(float range, float steps) {
  return (range < kSmallestRange ? kSmallestRange : range) / steps;
}

template <class T>
void dynamic_int8(const Quantising& to, int64_t r, const T* values, float largest) {
  to.scales[r] = scale_of(largest, 127.0f);
  store_row<true>(to.q + r * to.width, values, to.width, to.scales[r], Int8{});
}

template <class T>
void asymmetric_int8(const Quantising& to, int64_t r, const T* values, float largest) {
  Vec least{}, most{};
  for_each_two(to.width, [&](int64_t i, auto part) {
    const auto note = [&](Vec v) {
      least = smaller(v, least);
      most = larger(v, most);
      return v;
    };
    each(note, load(values + i, part));
  });
  float from = 0, up_to = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    from = std::min(from, least[i]);
    up_to = std::max(up_to, most[i]);
  }
  const float scale = largest == largest ? scale_of(up_to - from, 255.0f) : largest;
  const float zero_point = -128.0f - std::nearbyint(from / scale);
  to.scales[r] = scale;
  to.zero_points[r] = std::abs(zero_point) <= 128.0f ? static_cast<int32_t>(zero_point)
                                                    : std::numeric_limits<int32_t>::min();
  store_row<true>(to.q + r * to.width, values, to.width, scale, ShiftedInt8{zero_point});
}

template <class T>
void static_int8(const Quantising& to, int64_t r, const T* values, float) {
  if (to.zero_point == 0) {
    store_row<false>(to.q + r * to.width, values, to.width, to.scale, Int8{});
  } else {
    const ShiftedInt8 format{static_cast<float>(to.zero_point)};
    store_row<false>(to.q + r * to.width, values, to.width, to.scale, format);
  }
}

template <class T>
void dynamic_fp8(const Quantising& to, int64_t r, const T* values, float largest) {
  to.scales[r] = scale_of(largest, 448.0f);
  store_row<true>(to.q + r * to.width, values, to.width, to.scales[r], Fp8{});
}

template <class T>
void static_fp8(const Quantising& to, int64_t r, const T* values, float) {
  store_row<false>(to.q + r * to.width, values, to.width, to.scale, Fp8{});
}

template <class T>
void group_fp8(const Quantising& to, int64_t r, const T* values, float) {
  int8_t* q = to.q + r * to.width;
  float* scales = to.scales + r * (to.width / to.group);
  for (int64_t i = 0; i < to.width; i += to.group) {
    const float scale = scale_of(largest_of(values + i, to.group), 448.0f);
    scales[i / to.group] = scale;
    store_row<true>(q + i, values + i, to.group, scale, Fp8{});
  }
}

template <class T, class Source>
void quantise_rows(const Source& source, const Quantising& to, Sink<T> sink, int64_t rows) {
  const int64_t width = to.width;
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> rounded(new T[width]);
    for (int64_t r = begin; r < end; ++r) {
      const auto value = source.row(r);
      AbsMax<T> largest;
      for_each_step<Source>(width, [&](int64_t i, auto part) {
        store(rounded.get() + i, value(i, part), part);
        largest.add(rounded.get() + i, part);
      });
      sink(to, r, rounded.get(), largest.value());
    }
  });
}

// Rows that are there already.
template <class T>
void quantise_rows(
    const Rows<T>& source, const Quantising& to, Sink<T> sink, int64_t rows, bool by_largest) {
  parallel_rows(rows, to.width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* values = source.x + r * to.width;
      sink(to, r, values, by_largest ? largest_of(values, to.width) : 0.0f);
    }
  });
}

}  // namespace compilepass

// A vector of floats as wide as the machine, and the storage types that load into it.
//
// Written with the vector extensions of GCC and Clang, so one source serves AVX-512, AVX2 and
// anything else; -march=native picks the instructions. Arithmetic is fp32: a row is loaded from its
// storage type T, and rounded back to T (to nearest, ties to even, as PyTorch does) where stored.
#pragma once

#include <cstdint>
#include <cstring>

#include <torch/headeronly/util/Half.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace compilepass {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
constexpr int64_t kLanes = kBytes / sizeof(float);

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IntVec __attribute__((vector_size(kBytes)));
typedef uint32_t BitVec __attribute__((vector_size(kBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kBytes / 2)));
typedef int8_t ByteVec __attribute__((vector_size(kBytes / 4)));

#define COMPILEPASS_INLINE inline __attribute__((always_inline))

template <class To, class From>
COMPILEPASS_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

COMPILEPASS_INLINE Vec splat(float value) { return Vec{} + value; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// How a storage type is laid out in a register (Raw), and how it widens to and narrows from fp32.
template <class T>
struct Storage;

template <>
struct Storage<float> {
  using Raw = Vec;
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return raw; }
  static COMPILEPASS_INLINE Raw narrow(Vec v) { return v; }
};

template <>
struct Storage<BFloat16> {
  using Raw = HalfVec;
  static COMPILEPASS_INLINE Vec widen(Raw raw) {
    return bit_cast<Vec>(__builtin_convertvector(raw, BitVec) << 16);
  }
  static COMPILEPASS_INLINE Raw narrow(Vec v) {
    BitVec bits = bit_cast<BitVec>(v);
    BitVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    BitVec quiet_nan = (bits >> 16) | 0x40u;
    BitVec result = (v == v) ? rounded >> 16 : quiet_nan;
    return __builtin_convertvector(result, HalfVec);
  }
};

template <>
struct Storage<Float16> {
  using Raw = HalfVec;
#if defined(__AVX512F__)
  static COMPILEPASS_INLINE Vec widen(Raw raw) {
    return (Vec)_mm512_cvtph_ps((__m256i)raw);
  }
  static COMPILEPASS_INLINE Raw narrow(Vec v) {
    return (Raw)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(__F16C__)
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return (Vec)_mm256_cvtph_ps((__m128i)raw); }
  static COMPILEPASS_INLINE Raw narrow(Vec v) {
    return (Raw)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static COMPILEPASS_INLINE Vec widen(Raw raw) {
    Vec v;
    for (int64_t i = 0; i < kLanes; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(raw[i]);
    return v;
  }
  static COMPILEPASS_INLINE Raw narrow(Vec v) {
    Raw raw;
    for (int64_t i = 0; i < kLanes; ++i) raw[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
    return raw;
  }
#endif
};

// How much of a vector a step covers: all of it, or the end of a row. Lanes past the end read as 0.
struct Whole {
  static constexpr int64_t count = kLanes;
};
struct Rest {
  int64_t count;
};

template <class T, class Part>
COMPILEPASS_INLINE Vec load(const T* from, Part part) {
  typename Storage<T>::Raw raw{};
  std::memcpy(&raw, from, part.count * sizeof(T));
  return Storage<T>::widen(raw);
}

// Stores v rounded to T, and returns what was stored.
template <class T, class Part>
COMPILEPASS_INLINE Vec store(T* to, Vec v, Part part) {
  typename Storage<T>::Raw raw = Storage<T>::narrow(v);
  std::memcpy(to, &raw, part.count * sizeof(T));
  return Storage<T>::widen(raw);
}

template <class T>
COMPILEPASS_INLINE Vec round_to(Vec v) {
  return Storage<T>::widen(Storage<T>::narrow(v));
}

// Calls body(offset, Whole or Rest) along a row of n elements.
template <class Body>
COMPILEPASS_INLINE void for_each_vec(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Rest{n - i});
}

// Adds the lanes up, in halves.
template <class V>
COMPILEPASS_INLINE auto sum(V v) {
  constexpr size_t lanes = sizeof(V) / sizeof(v[0]);
  if constexpr (lanes == 16) {
    return sum(
        __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
        __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (lanes == 8) {
    return sum(
        __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
  } else {
    return (v[0] + v[1]) + (v[2] + v[3]);
  }
}

// The largest magnitude so far, NaN above all: the bits of |x| order as integers, as |x| does.
struct AbsMax {
  IntVec bits{};
  COMPILEPASS_INLINE void add(Vec v) {
    IntVec magnitude = bit_cast<IntVec>(v) & 0x7fffffff;
    bits = magnitude > bits ? magnitude : bits;
  }
  COMPILEPASS_INLINE float value() const {
    int32_t largest = 0;
    for (int64_t i = 0; i < kLanes; ++i) largest = bits[i] > largest ? bits[i] : largest;
    return bit_cast<float>(largest);
  }
};

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22;
// the integer is then in the low bits.
constexpr float kRounder = 12582912.0f;

// round(v) as int8, for |v| < 128. NaN gives some int8, as the cast in PyTorch does.
template <class Part>
COMPILEPASS_INLINE void store_int8(int8_t* to, Vec v, Part part) {
  ByteVec raw = __builtin_convertvector(bit_cast<IntVec>(v + kRounder), ByteVec);
  std::memcpy(to, &raw, part.count);
}

}  // namespace compilepass

// A vector of floats as wide as the machine, and the storage types that load into it.
//
// Written with the vector extensions of GCC and Clang, so one source serves AVX-512, AVX2 and
// anything else; -march=native picks the instructions. Arithmetic is fp32: a row is loaded from its
// storage type T, and rounded back to T (to nearest, ties to even, as PyTorch does) where stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <torch/headeronly/util/Half.h>

#if defined(__AVX__)
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

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22;
// the integer is then in the low bits.
constexpr float kRounder = 12582912.0f;

// a product, which is not merged with a sum into one operation that rounds once. (GCC merges across
// statements, and takes the vector apart for its own __builtin_assoc_barrier.) Without AVX it may
// be, and the last bit of a float32 result be another.
COMPILEPASS_INLINE Vec rounded_product(Vec v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#endif
  return v;
}

// The larger and smaller of two; b where one of them is NaN. (Compilers do not see vmaxps in `?:`.)
#if defined(__AVX512F__)
COMPILEPASS_INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
COMPILEPASS_INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
COMPILEPASS_INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
COMPILEPASS_INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
COMPILEPASS_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
COMPILEPASS_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
#endif

// v * 2^n for an integer n from -126 to 128, held as n + kRounder.
COMPILEPASS_INLINE Vec times_power_of_two(Vec v, Vec n_and_rounder) {
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)v, (__m512)(n_and_rounder - kRounder));
#else
  // 2^(n - 1), then doubled: 2^128 has no exponent of its own.
  return v * bit_cast<Vec>((bit_cast<IntVec>(n_and_rounder) + 126) << 23) * 2.0f;
#endif
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Integer lanes of another width: GCC's __builtin_convertvector splits these into many moves.
#if defined(__AVX512F__)
COMPILEPASS_INLINE BitVec widen_bits(HalfVec v) { return (BitVec)_mm512_cvtepu16_epi32((__m256i)v); }
COMPILEPASS_INLINE HalfVec low_halves(BitVec v) { return (HalfVec)_mm512_cvtepi32_epi16((__m512i)v); }
COMPILEPASS_INLINE ByteVec low_bytes(IntVec v) { return (ByteVec)_mm512_cvtepi32_epi8((__m512i)v); }
#elif defined(__AVX2__)
COMPILEPASS_INLINE BitVec widen_bits(HalfVec v) { return (BitVec)_mm256_cvtepu16_epi32((__m128i)v); }
COMPILEPASS_INLINE HalfVec low_halves(BitVec v) {
  const __m256i order = _mm256_setr_epi8(
      0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
      0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i halves = _mm256_shuffle_epi8((__m256i)v, order);
  return (HalfVec)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0)));
}
COMPILEPASS_INLINE ByteVec low_bytes(IntVec v) {
  const __m256i order = _mm256_setr_epi8(
      0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
      -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, order);
  const __m128i both = _mm_or_si128(
      _mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  return bit_cast<ByteVec>(_mm_cvtsi128_si64(both));
}
#else
COMPILEPASS_INLINE BitVec widen_bits(HalfVec v) { return __builtin_convertvector(v, BitVec); }
COMPILEPASS_INLINE HalfVec low_halves(BitVec v) { return __builtin_convertvector(v, HalfVec); }
COMPILEPASS_INLINE ByteVec low_bytes(IntVec v) { return __builtin_convertvector(v, ByteVec); }
#endif

// The low bytes of two vectors after one another, or in turn.
template <bool InTurn>
COMPILEPASS_INLINE HalfVec low_bytes(IntVec a, IntVec b) {
#if defined(__AVX512VBMI__)
  typedef uint8_t Places __attribute__((vector_size(kBytes)));
  Places places{};
  for (int i = 0; i < 2 * kLanes; ++i) {
    const int lane = InTurn ? i / 2 : i % kLanes, of_b = InTurn ? i % 2 : i / kLanes;
    places[i] = 64 * of_b + 4 * lane;
  }
  return (HalfVec)_mm512_castsi512_si256(
      _mm512_permutex2var_epi8((__m512i)a, (__m512i)places, (__m512i)b));
#else
  if constexpr (InTurn) return low_halves((BitVec)((a & 0xff) | (b << 8)));
  const struct {
    ByteVec a, b;
  } halves{low_bytes(a), low_bytes(b)};
  return bit_cast<HalfVec>(halves);
#endif
}

// Two vectors' worth of adjacent elements, in the order that suits their storage type: what is done
// element by element costs less so. (bfloat16 has the even ones first, which are half a float each.)
struct Two {
  Vec a, b;
};
COMPILEPASS_INLINE Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }
COMPILEPASS_INLINE Two operator-(Two x, Two y) { return {x.a - y.a, x.b - y.b}; }
COMPILEPASS_INLINE Two operator*(Two x, Two y) { return {x.a * y.a, x.b * y.b}; }
COMPILEPASS_INLINE Two operator+(Two x, float y) { return {x.a + y, x.b + y}; }
COMPILEPASS_INLINE Two operator-(Two x, float y) { return {x.a - y, x.b - y}; }
COMPILEPASS_INLINE Two operator*(Two x, float y) { return {x.a * y, x.b * y}; }

// function(vector, …), for each vector of its arguments.
template <class Function, class... More>
COMPILEPASS_INLINE Vec each(Function function, Vec v, More... more) {
  return function(v, more...);
}
template <class Function, class... More>
COMPILEPASS_INLINE Two each(Function function, Two v, More... more) {
  return {function(v.a, more.a...), function(v.b, more.b...)};
}

// All elements added up into one vector.
COMPILEPASS_INLINE Vec folded(Vec v) { return v; }
COMPILEPASS_INLINE Vec folded(Two v) { return v.a + v.b; }

// A storage type in a register (Raw): `widen` to fp32, `round` to the nearest value that the type
// has, and `pack` what `round` would give; bfloat16 does so with two at once (Raws).
template <class T>
struct Storage;

template <>
struct Storage<float> {
  using Raw = Vec;
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return raw; }
  static COMPILEPASS_INLINE Vec round(Vec v) { return v; }
  static COMPILEPASS_INLINE Raw pack(Vec v) { return v; }
  static COMPILEPASS_INLINE Two round(Two v) { return v; }
};

template <>
struct Storage<BFloat16> {
  using Raw = HalfVec;
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return bit_cast<Vec>(widen_bits(raw) << 16); }
#if defined(__AVX512BF16__) && defined(__AVX512F__)
  // The instruction flushes what is below 1.2e-38 to zero.
  static COMPILEPASS_INLINE Raw pack(Vec v) { return bit_cast<Raw>(_mm512_cvtneps_pbh((__m512)v)); }
  static COMPILEPASS_INLINE Vec round(Vec v) { return widen(pack(v)); }
#else
  static COMPILEPASS_INLINE Raw pack(Vec v) { return low_halves(bit_cast<BitVec>(round(v)) >> 16); }
  // To nearest, ties to even. A NaN must have nothing in its low half, or it may carry over into
  // a number: one that was widened, or that the machine made, has not; for others see `plain_nan`.
  static COMPILEPASS_INLINE Vec round(Vec v) {
    const BitVec bits = bit_cast<BitVec>(v);
    return bit_cast<Vec>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  }
#endif

  using Raws = BitVec;  // the even elements in lower halves, the odd ones in upper halves
  static COMPILEPASS_INLINE Two widen(Raws raws) {
    return {bit_cast<Vec>(raws << 16), bit_cast<Vec>(raws & 0xffff0000u)};
  }
#if defined(__AVX512BF16__) && defined(__AVX512F__)
  static COMPILEPASS_INLINE Raws pack(Two v) {
    const __m512i in_turn = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a);
    return (BitVec)_mm512_permutexvar_epi16(in_turn, (__m512i)halves);
  }
  static COMPILEPASS_INLINE Two round(Two v) { return widen(pack(v)); }

  // sum + a1 b1 + a2 b2, for neighbours 1 and 2.
  static COMPILEPASS_INLINE Vec dot(Vec sum, Raws a, Raws b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
  }
#else
  static COMPILEPASS_INLINE Raws pack(Two v) {
    return (bit_cast<BitVec>(round(v.a)) >> 16) | bit_cast<BitVec>(round(v.b));
  }
  static COMPILEPASS_INLINE Two round(Two v) { return {round(v.a), round(v.b)}; }
#endif
};

template <>
struct Storage<Float16> {
  using Raw = HalfVec;
#if defined(__AVX512F__)
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return (Vec)_mm512_cvtph_ps((__m256i)raw); }
  static COMPILEPASS_INLINE Raw pack(Vec v) {
    return (Raw)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(__F16C__)
  static COMPILEPASS_INLINE Vec widen(Raw raw) { return (Vec)_mm256_cvtph_ps((__m128i)raw); }
  static COMPILEPASS_INLINE Raw pack(Vec v) {
    return (Raw)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static COMPILEPASS_INLINE Vec widen(Raw raw) {
    Vec v;
    for (int64_t i = 0; i < kLanes; ++i) v[i] = c10::detail::fp16_ieee_to_fp32_value(raw[i]);
    return v;
  }
  static COMPILEPASS_INLINE Raw pack(Vec v) {
    Raw raw;
    for (int64_t i = 0; i < kLanes; ++i) raw[i] = c10::detail::fp16_ieee_from_fp32_value(v[i]);
    return raw;
  }
#endif
  static COMPILEPASS_INLINE Vec round(Vec v) { return widen(pack(v)); }
  static COMPILEPASS_INLINE Two round(Two v) { return {round(v.a), round(v.b)}; }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
template <class T>
constexpr bool kHasDot = std::is_same_v<T, BFloat16>;
#else
template <class T>
constexpr bool kHasDot = false;
#endif

// v with every NaN replaced by the common one.
COMPILEPASS_INLINE Vec plain_nan(Vec v) { return v == v ? v : splat(__builtin_nanf("")); }

// How much a step covers: two vectors, all of one, or the end of a row. Lanes past
// the end read as 0.
struct Twice {
  static constexpr int64_t count = 2 * kLanes;
};
struct Whole {
  static constexpr int64_t count = kLanes;
};
struct Rest {
  int64_t count;
};

// v with lanes past the end as 0.
COMPILEPASS_INLINE Two within(Two v, Twice) { return v; }
COMPILEPASS_INLINE Vec within(Vec v, Whole) { return v; }
COMPILEPASS_INLINE Vec within(Vec v, Rest part) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(part.count) ? v : Vec{};
}

template <class T, class Part>
COMPILEPASS_INLINE Vec load(const T* from, Part part) {
  typename Storage<T>::Raw raw{};
  std::memcpy(&raw, from, part.count * sizeof(T));
  return Storage<T>::widen(raw);
}

template <class T>
COMPILEPASS_INLINE Two load(const T* from, Twice) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    BitVec raws;
    std::memcpy(&raws, from, sizeof(raws));
    return Storage<T>::widen(raws);
  } else {  // one by one: compilers put two that are copied together into memory
    return {load(from, Whole{}), load(from + kLanes, Whole{})};
  }
}

// Stores v rounded to T, and returns what was stored.
template <class T, class Part>
COMPILEPASS_INLINE Vec store(T* to, Vec v, Part part) {
  const typename Storage<T>::Raw raw = Storage<T>::pack(v);
  std::memcpy(to, &raw, part.count * sizeof(T));
  return Storage<T>::round(v);
}

template <class T>
COMPILEPASS_INLINE Two store(T* to, Two v, Twice) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const BitVec raws = Storage<T>::pack(v);
    std::memcpy(to, &raws, sizeof(raws));
    return Storage<T>::widen(raws);
  } else {
    return {store(to, v.a, Whole{}), store(to + kLanes, v.b, Whole{})};
  }
}

// Twice as many floats as a part covers, in their order.
COMPILEPASS_INLINE Two load_double(const float* from, Whole) { return load(from, Twice{}); }
COMPILEPASS_INLINE Two load_double(const float* from, Rest part) {
  Two v{};
  std::memcpy(&v, from, part.count * 2 * sizeof(float));
  return v;
}
COMPILEPASS_INLINE void store_double(float* to, Two v, Whole) { store(to, v, Twice{}); }
COMPILEPASS_INLINE void store_double(float* to, Two v, Rest part) {
  std::memcpy(to, &v, part.count * 2 * sizeof(float));
}

// Neighbours taken apart: the elements at even and at odd places of twice as many as a part covers.
struct Pairs {
  Vec first, second;
};
template <class T, class Part>
COMPILEPASS_INLINE Pairs load_pairs(const T* from, Part part) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const Two raw = load_double(from, part);
#if defined(__AVX512F__)
    return {
        __builtin_shufflevector(
            raw.a, raw.b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
        __builtin_shufflevector(
            raw.a, raw.b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
#else
    return {
        __builtin_shufflevector(raw.a, raw.b, 0, 2, 4, 6, 8, 10, 12, 14),
        __builtin_shufflevector(raw.a, raw.b, 1, 3, 5, 7, 9, 11, 13, 15)};
#endif
  } else {
    BitVec raw{};
    std::memcpy(&raw, from, part.count * 2 * sizeof(T));
    if constexpr (std::is_same_v<T, BFloat16>) {  // the upper half of a float
      return {bit_cast<Vec>(raw << 16), bit_cast<Vec>(raw & 0xffff0000u)};
    } else {
      return {Storage<T>::widen(low_halves(raw)), Storage<T>::widen(low_halves(raw >> 16))};
    }
  }
}

// Stores neighbours that were taken apart, rounded to T.
template <class T, class Part>
COMPILEPASS_INLINE void store_pairs(T* to, Pairs v, Part part) {
  if constexpr (sizeof(T) == sizeof(float)) {
#if defined(__AVX512F__)
    const Two raw{
        __builtin_shufflevector(
            v.first, v.second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
        __builtin_shufflevector(
            v.first, v.second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
#else
    const Two raw{
        __builtin_shufflevector(v.first, v.second, 0, 8, 1, 9, 2, 10, 3, 11),
        __builtin_shufflevector(v.first, v.second, 4, 12, 5, 13, 6, 14, 7, 15)};
#endif
    store_double(to, raw, part);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const BitVec raw = Storage<T>::pack(Two{v.first, v.second});
    std::memcpy(to, &raw, part.count * 2 * sizeof(T));
  } else {
    const BitVec raw =
        widen_bits(Storage<T>::pack(v.first)) | (widen_bits(Storage<T>::pack(v.second)) << 16);
    std::memcpy(to, &raw, part.count * 2 * sizeof(T));
  }
}

// Calls body(offset, Whole or Rest) along a row of n elements.
template <class Body>
COMPILEPASS_INLINE void for_each_vec(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Rest{n - i});
}

// The same with two vectors a step: body(offset, Twice, Whole or Rest).
template <class Body>
COMPILEPASS_INLINE void for_each_two(int64_t n, Body body) {
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + Twice::count <= n; i += Twice::count) body(i, Twice{});
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

template <class V>
COMPILEPASS_INLINE auto largest_lane(V v) {
  constexpr size_t lanes = sizeof(V) / sizeof(v[0]);
  const auto larger_half = [](auto a, auto b) { return largest_lane(a > b ? a : b); };
  if constexpr (lanes == 32) {
    return larger_half(
        __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        __builtin_shufflevector(
            v, v, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
  } else if constexpr (lanes == 16) {
    return larger_half(
        __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
        __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (lanes == 8) {
    return larger_half(
        __builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
  } else {
    const auto a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
}

// The largest magnitude so far, NaN above all: the bits of |x| order as integers, as |x| does, in 16
// bits as well as in 32.
template <class T>
struct AbsMax {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  typedef Bits Lanes __attribute__((vector_size(kBytes)));
  static constexpr int64_t kCount = kBytes / sizeof(T);
  Lanes largest{};

  template <class Part>
  COMPILEPASS_INLINE void add(const T* from, Part part) {
    Lanes raw{};
    std::memcpy(&raw, from, part.count * sizeof(T));
    raw &= static_cast<Bits>(-1) >> 1;
    largest = raw > largest ? raw : largest;
  }
  COMPILEPASS_INLINE void add(const float* from, Twice) {
    add(from, Whole{});
    add(from + kLanes, Whole{});
  }
  COMPILEPASS_INLINE float value() const {
    typename Storage<T>::Raw raw{};
    const Bits bits = largest_lane(largest);
    std::memcpy(&raw, &bits, sizeof(bits));
    return Storage<T>::widen(raw)[0];
  }
};

// v / by, with `inverse` = 1 / by, for a quotient that neither overflows nor is tiny: rounded as a
// division is, since the second step makes good what the first one lost (Markstein).
COMPILEPASS_INLINE Vec divided(Vec v, float by, float inverse) {
#if defined(__AVX512F__)
  const __m512 quotient = (__m512)(v * inverse);
  const __m512 rest = _mm512_fnmadd_ps(quotient, _mm512_set1_ps(by), (__m512)v);
  return (Vec)_mm512_fmadd_ps(rest, _mm512_set1_ps(inverse), quotient);
#elif defined(__FMA__)
  const __m256 quotient = (__m256)(v * inverse);
  const __m256 rest = _mm256_fnmadd_ps(quotient, _mm256_set1_ps(by), (__m256)v);
  return (Vec)_mm256_fmadd_ps(rest, _mm256_set1_ps(inverse), quotient);
#else
  return v / by;
#endif
}

}  // namespace compilepass

// Rotary position embedding: pairs of a row's elements turned by the angles of its position.
//
// Products are rounded to T, and so is their sum, as the operations one by one would: the kernel's
// result is theirs bit for bit. `Wide` keeps them in fp32.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <type_traits>

#include "norms.h"

namespace compilepass {

// The dims that rows are counted along, with what each of x, cos and sin moves by along them: as few
// as there can be, since two are one where all three move on evenly.
class Lead {
 public:
  static constexpr size_t kMost = 8;
  using Steps = std::array<int64_t, 3>;

  size_t dims = 0;
  std::array<int64_t, kMost> sizes;
  std::array<Steps, kMost> steps;

  void add(int64_t size, const Steps& step) {
    if (size == 1) return;
    if (dims > 0 && continues(size, step)) {
      sizes[dims - 1] *= size;
      steps[dims - 1] = step;
    } else {
      sizes[dims] = size;
      steps[dims++] = step;
    }
  }

 private:
  bool continues(int64_t size, const Steps& step) const {
    for (size_t t = 0; t < step.size(); ++t) {
      if (steps[dims - 1][t] != step[t] * size) return false;
    }
    return true;
  }
};

// Where the rows of x, cos and sin lie: runs of rows that have one row of cos and of sin.
class Walk {
 public:
  Lead::Steps at{};

  Walk(const Lead& lead, int64_t row) : lead_(lead) {
    for (size_t d = lead.dims; d-- > 0; row /= lead.sizes[d]) {
      index_[d] = row % lead.sizes[d];
      move(d, index_[d]);
    }
  }

  // Rows from here on that differ in the last dim only, and there in x only.
  int64_t run() const {
    if (lead_.dims == 0 || last()[1] != 0 || last()[2] != 0) return 1;
    return lead_.sizes[lead_.dims - 1] - index_[lead_.dims - 1];
  }
  int64_t stride() const { return lead_.dims == 0 ? 0 : last()[0]; }

  // Goes on by rows of one run.
  void advance(int64_t count) {
#pragma GCC unroll 1
    for (size_t d = lead_.dims; d-- > 0; count = 1) {
      index_[d] += count;
      move(d, count);
      if (index_[d] != lead_.sizes[d]) return;
      index_[d] = 0;
      move(d, -lead_.sizes[d]);
    }
  }

 private:
  const Lead::Steps& last() const { return lead_.steps[lead_.dims - 1]; }
  COMPILEPASS_INLINE void move(size_t d, int64_t count) {
    for (size_t t = 0; t < at.size(); ++t) at[t] += count * lead_.steps[d][t];
  }

  const Lead& lead_;
  std::array<int64_t, Lead::kMost> index_;
};

// Calls body(place of the first row, rows) for the runs between two rows.
template <class Body>
void for_each_run(const Lead& lead, int64_t begin, int64_t end, const Body& body) {
  Walk walk(lead, begin);
  for (int64_t row = begin; row < end;) {
    const int64_t count = std::min(end - row, walk.run());
    body(walk, row, count);
    walk.advance(count);
    row += count;
  }
}

// The rows of a tensor to rotate, and the weight of the norm before, if there is one.
template <class T>
struct Rotation {
  const T* x;
  const T* cos;
  const T* sin;
  const T* weight;
  T* out;
  int64_t width;
  int64_t turned;  // elements of a row that are rotated, the first ones
  int64_t rows;
  Lead lead;
};

// Calls body(rotation, begin, end) for the rows of all tensors, shared out among the threads at once.
template <class T, class Body>
void for_rotations(std::span<const Rotation<T>> all, const Body& body) {
  int64_t total = 0;
  for (const auto& r : all) total += r.rows;
  parallel_rows(total, all[0].width, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (const auto& r : all) {
      const int64_t from = std::max<int64_t>(begin - before, 0);
      const int64_t up_to = std::min(end - before, r.rows);
      if (from < up_to) body(r, from, up_to);
      before += r.rows;
    }
  });
}

template <class T, bool Wide, class V>
COMPILEPASS_INLINE V product(V a, V b) {
  if constexpr (Wide || std::is_same_v<T, float>) {
    return each([](Vec v) { return rounded_product(v); }, a * b);
  } else {
    return Storage<T>::round(a * b);
  }
}

// a c + sign b s, the products rounded.
template <class T, bool Wide, int Sign>
COMPILEPASS_INLINE Vec combined(Vec a, Vec c, Vec b, Vec s) {
  if constexpr (kHasDot<T> && !Wide) {  // rounds both at once, and adds up what lies together then
    constexpr uint32_t kOne = 0x3f80, kSign = Sign < 0 ? 0x8000 : 0;
    const BitVec ones = BitVec{} + (kOne | ((kOne | kSign) << 16));
    return Storage<T>::dot(Vec{}, Storage<T>::pack(Two{a * c, b * s}), ones);
  } else if constexpr (Sign < 0) {
    return product<T, Wide>(a, c) - product<T, Wide>(b, s);
  } else {
    return product<T, Wide>(a, c) + product<T, Wide>(b, s);
  }
}
template <class T, bool Wide, int Sign>
COMPILEPASS_INLINE Two combined(Two a, Two c, Two b, Two s) {
  if constexpr (kHasDot<T> && !Wide) {
    return {combined<T, Wide, Sign>(a.a, c.a, b.a, s.a), combined<T, Wide, Sign>(a.b, c.b, b.b, s.b)};
  } else if constexpr (Sign < 0) {  // pairs of bfloat16 are rounded together
    return product<T, Wide>(a, c) - product<T, Wide>(b, s);
  } else {
    return product<T, Wide>(a, c) + product<T, Wide>(b, s);
  }
}

// Rows that start `stride` elements after one another.
template <class T>
struct Run {
  T* start;
  int64_t stride;
  T* operator[](int64_t r) const { return start + r * stride; }
};

template <class T, bool Interleaved, bool PerPair, bool Wide>
COMPILEPASS_INLINE void rotate_row(const T* x, const T* cos, const T* sin, T* out, int64_t turned) {
  const int64_t half = turned / 2;
  if constexpr (Interleaved) {
    for_each_vec(half, [&](int64_t i, auto part) {
      const auto angles = [&](const T* table) {
        if constexpr (!PerPair) {
          return load_pairs(table + 2 * i, part);
        } else {
          const Vec of_pair = load(table + i, part);
          return Pairs{of_pair, of_pair};
        }
      };
      const Pairs v = load_pairs(x + 2 * i, part), c = angles(cos), s = angles(sin);
      const Vec first = combined<T, Wide, -1>(v.first, c.first, v.second, s.first);
      const Vec second = combined<T, Wide, 1>(v.second, c.second, v.first, s.second);
      store_pairs(out + 2 * i, {first, second}, part);
    });
  } else {
    const int64_t second = PerPair ? 0 : half;
    for_each_two(half, [&](int64_t i, auto part) {
      const auto a = load(x + i, part), b = load(x + half + i, part);
      const auto cos_a = load(cos + i, part), sin_a = load(sin + i, part);
      const auto cos_b = PerPair ? cos_a : load(cos + second + i, part);
      const auto sin_b = PerPair ? sin_a : load(sin + second + i, part);
      store(out + i, combined<T, Wide, -1>(a, cos_a, b, sin_a), part);
      store(out + half + i, combined<T, Wide, 1>(b, cos_b, a, sin_b), part);
    });
  }
}

template <bool Interleaved, bool PerPair, bool Wide, class T>
void rotate_rows(const Rotation<T>& r, int64_t begin, int64_t end) {
  for_each_run(r.lead, begin, end, [&](const Walk& walk, int64_t row, int64_t count) {
    const Run<const T> x{r.x + walk.at[0], walk.stride()};
    const Run<T> out{r.out + row * r.width, r.width};
    for (int64_t i = 0; i < count; ++i) {
      rotate_row<T, Interleaved, PerPair, Wide>(
          x[i], r.cos + walk.at[1], r.sin + walk.at[2], out[i], r.turned);
      if (r.turned < r.width) {
        std::memcpy(out[i] + r.turned, x[i] + r.turned, (r.width - r.turned) * sizeof(T));
      }
    }
  });
}

template <class T, class Apply>
COMPILEPASS_INLINE void norm_row(
    const T* x, float scale, const Weight<T, Apply>& weight, T* out, int64_t width) {
  for_each_two(width, [&](int64_t i, auto part) {
    store(out + i, weight.apply(load(x + i, part) * scale, load(weight.values + i, part)), part);
  });
}

// A row normed and rotated in registers, in two halves.
template <bool PerPair, class Apply>
COMPILEPASS_INLINE void norm_rotate_row(
    const float* x, float scale, const Weight<float, Apply>& weight, const float* cos,
    const float* sin, float* out, int64_t width, int64_t turned) {
  const auto normed = [&](int64_t i, auto part) {
    return weight.apply(load(x + i, part) * scale, load(weight.values + i, part));
  };
  const int64_t half = turned / 2, second = PerPair ? 0 : half;
  for_each_two(half, [&](int64_t i, auto part) {
    const auto a = normed(i, part), b = normed(half + i, part);
    const auto cos_a = load(cos + i, part), sin_a = load(sin + i, part);
    const auto cos_b = load(cos + second + i, part), sin_b = load(sin + second + i, part);
    store(out + i, combined<float, false, -1>(a, cos_a, b, sin_a), part);
    store(out + half + i, combined<float, false, 1>(b, cos_b, a, sin_b), part);
  });
  for_each_two(width - turned, [&](int64_t i, auto part) {
    store(out + turned + i, normed(turned + i, part), part);
  });
}

// Rows normed, then rotated in their place.
template <bool Interleaved, bool PerPair, class T, class Apply>
void norm_rotate_rows(
    const Rotation<T>& r, const Weight<T, Apply>& weight, float eps, int64_t begin, int64_t end) {
  // Rows whose scales are computed at once, as vectors; they stay in the first-level cache.
  constexpr int64_t kBlock = sizeof(T) == sizeof(float) ? 16 : 32;
  Walk walk(r.lead, begin);
  for (int64_t row = begin; row < end; row += kBlock) {
    const int64_t block = std::min(end - row, kBlock);
    std::array<Lead::Steps, kBlock> at;
    std::array<float, kBlock> scales{};
    for (int64_t n = 0; n < block; ++n) {
      at[n] = walk.at;
      scales[n] = sum_of_squares(r.x + at[n][0], r.width);
      walk.advance(1);
    }
    for (float& scale : scales) scale = inverse_rms(scale, r.width, eps);
    const auto place = [&](int64_t n) { return r.out + (row + n) * r.width; };
    if constexpr (std::is_same_v<T, float> && !Interleaved) {
      for (int64_t n = 0; n < block; ++n) {
        norm_rotate_row<PerPair>(
            r.x + at[n][0], scales[n], weight, r.cos + at[n][1], r.sin + at[n][2], place(n),
            r.width, r.turned);
      }
      continue;
    }
    // Two loops for a few rows at a time: the processor looks further ahead in each than in one, where
    // five roundings wait for one another.
    constexpr int64_t kGroup = 8;
    for (int64_t start = 0; start < block; start += kGroup) {
      const int64_t last = std::min(start + kGroup, block);
      for (int64_t n = start; n < last; ++n) {
        norm_row(r.x + at[n][0], scales[n], weight, place(n), r.width);
      }
      for (int64_t n = start; n < last; ++n) {
        rotate_row<T, Interleaved, PerPair, false>(
            place(n), r.cos + at[n][1], r.sin + at[n][2], place(n), r.turned);
      }
    }
  }
}

}  // namespace compilepass

// Rotary position embedding: pairs of a row's elements turned by the angles of its position.
//
// Products are rounded to T, and so is their sum, as the operations one by one would: the kernel's
// result is theirs bit for bit. `Wide` keeps them in fp32.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "norms.h"

namespace compilepass {

// The dims that rows are counted along, with what each of x, cos and sin moves by along them.
struct Lead {
  std::vector<int64_t> sizes;
  std::array<std::vector<int64_t>, 3> strides;
};

// Where the rows of x, cos and sin lie: runs of rows that have one row of cos and of sin.
class Walk {
 public:
  std::array<int64_t, 3> at{};

  Walk(const Lead& lead, int64_t row) : lead_(lead), index_(lead.sizes.size()) {
    for (size_t d = lead.sizes.size(); d-- > 0; row /= lead.sizes[d]) {
      index_[d] = row % lead.sizes[d];
      for (size_t t = 0; t < at.size(); ++t) at[t] += index_[d] * lead.strides[t][d];
    }
  }

  // Rows from here on that differ in the last dim only, and there in x only.
  int64_t run() const {
    if (index_.empty() || lead_.strides[1].back() != 0 || lead_.strides[2].back() != 0) return 1;
    return lead_.sizes.back() - index_.back();
  }
  int64_t stride() const { return index_.empty() ? 0 : lead_.strides[0].back(); }

  // Goes on by rows of one run.
  void advance(int64_t count) {
    for (size_t d = index_.size(); d-- > 0; count = 1) {
      index_[d] += count;
      const bool last = index_[d] == lead_.sizes[d];
      const int64_t by = last ? count - lead_.sizes[d] : count;
      for (size_t t = 0; t < at.size(); ++t) at[t] += by * lead_.strides[t][d];
      if (!last) return;
      index_[d] = 0;
    }
  }

 private:
  const Lead& lead_;
  std::vector<int64_t> index_;
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

template <class T>
struct Rotation {
  const T* x;
  const T* cos;
  const T* sin;
  T* out;
  int64_t width;
  int64_t turned;  // elements of a row that are rotated, the first ones
};

template <class T, bool Wide, class V>
COMPILEPASS_INLINE V product(V a, V b) {
  if constexpr (Wide || std::is_same_v<T, float>) {
    return each([](Vec v) { return rounded_product(v); }, a * b);
  } else {
    return Storage<T>::round(a * b);
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
      const Vec first = product<T, Wide>(v.first, c.first) - product<T, Wide>(v.second, s.first);
      const Vec second = product<T, Wide>(v.second, c.second) + product<T, Wide>(v.first, s.second);
      store_pairs(out + 2 * i, {first, second}, part);
    });
  } else {
    const int64_t second = PerPair ? 0 : half;
    for_each_two(half, [&](int64_t i, auto part) {
      const auto a = load(x + i, part), b = load(x + half + i, part);
      const auto cos_a = load(cos + i, part), sin_a = load(sin + i, part);
      const auto cos_b = PerPair ? cos_a : load(cos + second + i, part);
      const auto sin_b = PerPair ? sin_a : load(sin + second + i, part);
      store(out + i, product<T, Wide>(a, cos_a) - product<T, Wide>(b, sin_a), part);
      store(out + half + i, product<T, Wide>(b, cos_b) + product<T, Wide>(a, sin_b), part);
    });
  }
}

template <bool Interleaved, bool PerPair, bool Wide, class T>
void rotate_rows(const Rotation<T>& r, const Lead& lead, int64_t rows) {
  parallel_rows(rows, r.width, [&](int64_t begin, int64_t end) {
    for_each_run(lead, begin, end, [&](const Walk& walk, int64_t row, int64_t count) {
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
  });
}

template <class Body>
void choose(bool flag, const Body& body) {
  flag ? body(std::true_type{}) : body(std::false_type{});
}

template <class T>
void rotate_rows(
    const Rotation<T>& r, const Lead& lead, int64_t rows, bool interleaved, bool per_pair,
    bool wide) {
  choose(interleaved, [&]<class Interleaved>(Interleaved) {
    choose(per_pair, [&]<class PerPair>(PerPair) {
      choose(wide, [&]<class IsWide>(IsWide) {
        rotate_rows<Interleaved::value, PerPair::value, IsWide::value>(r, lead, rows);
      });
    });
  });
}

// A row normed, then rotated. In halves, the normed values stay in registers; neighbours are rotated
// in their place among the results.
template <bool Interleaved, bool PerPair, class T, class Apply>
COMPILEPASS_INLINE void norm_rotate_row(
    const T* x, float scale, const Weight<T, Apply>& weight, const T* cos, const T* sin, T* out,
    int64_t width, int64_t turned) {
  const auto normed = [&](int64_t i, auto part) {
    return weight.apply(load(x + i, part) * scale, load(weight.values + i, part));
  };
  const int64_t half = Interleaved ? 0 : turned / 2;
  for_each_two(half, [&](int64_t i, auto part) {
    const auto a = Storage<T>::round(normed(i, part));
    const auto b = Storage<T>::round(normed(half + i, part));
    const auto cos_a = load(cos + i, part), sin_a = load(sin + i, part);
    const auto cos_b = PerPair ? cos_a : load(cos + half + i, part);
    const auto sin_b = PerPair ? sin_a : load(sin + half + i, part);
    store(out + i, product<T, false>(a, cos_a) - product<T, false>(b, sin_a), part);
    store(out + half + i, product<T, false>(b, cos_b) + product<T, false>(a, sin_b), part);
  });
  for_each_two(width - 2 * half, [&](int64_t i, auto part) {
    store(out + 2 * half + i, normed(2 * half + i, part), part);
  });
  if constexpr (Interleaved) rotate_row<T, true, PerPair, false>(out, cos, sin, out, turned);
}

template <bool Interleaved, bool PerPair, class T, class Apply>
void norm_rotate_rows(
    const Rotation<T>& r, const Weight<T, Apply>& weight, float eps, const Lead& lead,
    int64_t rows) {
  constexpr int64_t kBlock = 32;  // rows whose scales are computed at once, as vectors
  parallel_rows(rows, r.width, [&](int64_t begin, int64_t end) {
    Walk walk(lead, begin);
    for (int64_t row = begin; row < end; row += kBlock) {
      const int64_t block = std::min(end - row, kBlock);
      std::array<std::array<int64_t, 3>, kBlock> at;
      std::array<float, kBlock> scales{};
      for (int64_t n = 0; n < block; ++n) {
        at[n] = walk.at;
        scales[n] = sum_of_squares(r.width, [from = r.x + at[n][0]](int64_t i, auto part) {
          return load(from + i, part);
        });
        walk.advance(1);
      }
      for (float& scale : scales) scale = inverse_rms(scale, r.width, eps);
      for (int64_t n = 0; n < block; ++n) {
        norm_rotate_row<Interleaved, PerPair>(
            r.x + at[n][0], scales[n], weight, r.cos + at[n][1], r.sin + at[n][2],
            r.out + (row + n) * r.width, r.width, r.turned);
      }
    }
  });
}

}  // namespace compilepass

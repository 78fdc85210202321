// Rotary position embedding: pairs of a row's elements turned by the angles of its position.
//
// Products are rounded to T, and so is their sum, as the operations one by one would: the kernel's
// result is theirs bit for bit. `Wide` keeps them in fp32.
#pragma once

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

// Where the rows of x, cos and sin lie, one row after the other.
class Walk {
 public:
  std::array<int64_t, 3> at{};

  Walk(const Lead& lead, int64_t row) : lead_(lead), index_(lead.sizes.size()) {
    for (size_t d = lead.sizes.size(); d-- > 0; row /= lead.sizes[d]) {
      index_[d] = row % lead.sizes[d];
      for (size_t t = 0; t < at.size(); ++t) at[t] += index_[d] * lead.strides[t][d];
    }
  }

  void next() {
    for (size_t d = index_.size(); d-- > 0;) {
      const bool last = ++index_[d] == lead_.sizes[d];
      const int64_t back = last ? lead_.sizes[d] - 1 : -1;
      for (size_t t = 0; t < at.size(); ++t) at[t] -= back * lead_.strides[t][d];
      if (!last) return;
      index_[d] = 0;
    }
  }

 private:
  const Lead& lead_;
  std::vector<int64_t> index_;
};

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

template <class T, bool Interleaved, bool PerPair, bool Wide>
COMPILEPASS_INLINE void rotate_row(const T* x, const T* cos, const T* sin, T* out, int64_t turned) {
  if constexpr (Interleaved) {
    Vec signs;  // of what the swapped neighbours count with
    for (int64_t i = 0; i < kLanes; ++i) signs[i] = i % 2 ? 1.0f : -1.0f;
    for_each_vec(turned, [&](int64_t i, auto part) {
      const auto angles = [&](const T* table) {
        if constexpr (!PerPair) {
          return load(table + i, part);
        } else {
          return repeat_lower(load(table + i / 2, half_of(part)));
        }
      };
      const Vec v = load(x + i, part);
      const Vec kept = product<T, Wide>(v, angles(cos));
      const Vec crossed = product<T, Wide>(swap_neighbours(v) * signs, angles(sin));
      store(out + i, kept + crossed, part);
    });
  } else {
    const int64_t half = turned / 2, second = PerPair ? 0 : half;
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
    Walk walk(lead, begin);
    for (int64_t row = begin; row < end; ++row, walk.next()) {
      const T* x = r.x + walk.at[0];
      T* out = r.out + row * r.width;
      rotate_row<T, Interleaved, PerPair, Wide>(
          x, r.cos + walk.at[1], r.sin + walk.at[2], out, r.turned);
      if (r.turned < r.width) {
        std::memcpy(out + r.turned, x + r.turned, (r.width - r.turned) * sizeof(T));
      }
    }
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

// Rows normed, then rotated in their place among the results. Tables have a value a pair.
template <bool Interleaved, class T, class Apply>
void norm_rotate_rows(
    const Rotation<T>& r, const Weight<T, Apply>& weight, float eps, const Lead& lead,
    int64_t rows) {
  parallel_rows(rows, r.width, [&](int64_t begin, int64_t end) {
    Walk walk(lead, begin);
    for (int64_t row = begin; row < end; ++row, walk.next()) {
      const T* x = r.x + walk.at[0];
      T* out = r.out + row * r.width;
      const auto normed = normed_row(x, weight, eps, r.width, [x](int64_t i, auto part) {
        return load(x + i, part);
      });
      for_each_two(r.width, [&](int64_t i, auto part) { store(out + i, normed(i, part), part); });
      rotate_row<T, Interleaved, true, false>(
          out, r.cos + walk.at[1], r.sin + walk.at[2], out, r.turned);
    }
  });
}

}  // namespace compilepass

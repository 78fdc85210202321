// Row-wise fused kernels: a source that computes a row, and what is done with it.
//
// A source has `row(r)`, which returns a function (offset, part) -> Vec (or Two, for a part that is
// Twice) that computes the row's values before their rounding to T. `write_rows` stores them; `quantise_rows` rounds them to T, as
// the unfused operation would, and quantises what that gives, with one scale a row.
#pragma once

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "vec.h"

namespace compilepass {

// Elements below which another thread costs more than it gains.
constexpr int64_t kElementsPerThread = 16384;

template <class Body>
void parallel_rows(int64_t rows, int64_t width, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / width);
  torch::stable::parallel_for(0, rows, grain, body);
}

template <class T>
struct Rows {
  const T* x;
  int64_t width;
  auto row(int64_t r) const {
    const T* from = x + r * width;
    return [from](int64_t i, auto part) { return load(from + i, part); };
  }
};

// Where rows start, and how many elements lie between two starts.
template <class T>
struct Spaced {
  const T* start;
  int64_t stride;
  const T* row(int64_t r) const { return start + r * stride; }
};

// function(x, T{}), element by element.
template <class T, class Function>
void map(const T* x, T* out, int64_t count, Function function) {
  torch::stable::parallel_for(0, count, kElementsPerThread, [&](int64_t begin, int64_t end) {
    for_each_two(end - begin, [&](int64_t i, auto part) {
      const auto value = [&](Vec v) { return function(v, T{}); };
      store(out + begin + i, each(value, load(x + begin + i, part)), part);
    });
  });
}

// The steps along a row of a source: of two vectors, unless it says kOneByOne.
template <class Source, class Body>
COMPILEPASS_INLINE void for_each_step(int64_t width, Body body) {
  if constexpr (requires { Source::kOneByOne; }) {
    for_each_vec(width, body);
  } else {
    for_each_two(width, body);
  }
}

template <class T, class Source>
void write_rows(const Source& source, T* out, int64_t rows, int64_t width) {
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto value = source.row(r);
      T* to = out + r * width;
      for_each_step<Source>(
          width, [&](int64_t i, auto part) { store(to + i, value(i, part), part); });
    }
  });
}

template <class T, class Source>
void quantise_rows(const Source& source, int8_t* q, float* scales, int64_t rows, int64_t width) {
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> rounded(new T[width]);
    for (int64_t r = begin; r < end; ++r) {
      const auto value = source.row(r);
      AbsMax largest;
      for_each_step<Source>(width, [&](int64_t i, auto part) {
        largest.add(store(rounded.get() + i, value(i, part), part));
      });
      const float limit = largest.value();
      const float scale = (limit < 1e-5f ? 1e-5f : limit) / 127.0f;
      const float inverse = 1.0f / scale;
      scales[r] = scale;
      int8_t* to = q + r * width;
      for_each_two(width, [&](int64_t i, auto part) {
        const auto quotient = [&](Vec v) { return divided(v, scale, inverse); };
        store_int8<T>(to + i, each(quotient, load(rounded.get() + i, part)), part);
      });
    }
  });
}

}  // namespace compilepass

// What the ops of every family are made of: how a call is judged and passed on, tensors made, and
// kernels named.
//
// A call that a kernel does not take (another dtype, mixed dtypes, a gradient to record) goes to
// the op of the same name in `compilepass_native`, which the Python side defines.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "rows.h"

namespace compilepass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// What an op of one result or of several leaves on the stack.
template <class Result>
struct Results {
  static constexpr size_t kCount = 1;
  static Result of(StableIValue* stack) { return to<Result>(stack[0]); }
};
template <class... Each>
struct Results<std::tuple<Each...>> {
  static constexpr size_t kCount = sizeof...(Each);
  static std::tuple<Each...> of(StableIValue* stack) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Each...>{to<Each>(stack[I])...};
    }(std::index_sequence_for<Each...>{});
  }
};

template <class Result, class... Args>
Result call(const char* op, const Args&... args) {
  std::array<StableIValue, std::max(sizeof...(Args), Results<Result>::kCount)> stack{from(args)...};
  const auto failed = torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION);
  STD_TORCH_CHECK(!failed, op, " failed");
  return Results<Result>::of(stack.data());
}

// The stable ABI does not tell requires_grad; a view of the tensor does, by having a history.
inline bool requires_grad(const Tensor& t) {
  return !call<bool>("aten::is_leaf", t) ||
      !call<bool>("aten::is_leaf", call<Tensor>("aten::alias", t));
}

template <class... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return aoti_torch_grad_mode_is_enabled() && (requires_grad(tensors) || ...);
}

inline bool is_storage(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

inline bool is_matrix(const Tensor& t, ScalarType dtype) {
  return t.is_cpu() && t.scalar_type() == dtype && t.dim() > 0 && t.size(-1) > 0;
}

template <class... Tensors>
bool takes(const Tensor& x, const Tensors&... others) {
  const ScalarType dtype = x.scalar_type();
  return is_storage(dtype) && is_matrix(x, dtype) &&
      ((others.is_cpu() && others.scalar_type() == dtype) && ...) && !needs_grad(x, others...);
}

// Calls body with a value of the storage type of a dtype that `takes` took.
template <class Body>
void with_storage(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return body(BFloat16{});
    case ScalarType::Half:
      return body(Float16{});
    default:
      return body(float{});
  }
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t ? data<T>(*t) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// A new contiguous tensor, shaped like `like` but for the last dim.
inline Tensor empty(const Tensor& like, int64_t width, ScalarType dtype) {
  const auto shape = like.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end()), strides(sizes.size());
  sizes.back() = width;
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(1, sizes[d]);
  }
  AtenTensorHandle handle = nullptr;
  const auto failed = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), to<int32_t>(from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle);
  STD_TORCH_CHECK(!failed, "a result of ", stride, " elements could not be allocated");
  return Tensor(handle);
}

struct Quantised {
  Tensor q, scale;
  Quantised(const Tensor& like, int64_t width)
      : q(empty(like, width, ScalarType::Char)), scale(empty(like, 1, ScalarType::Float)) {}
};

// The two sinks of a row source, by whether the op quantises.
template <class T, class Source>
void run(const Source& source, const Tensor& out, int64_t rows, int64_t width) {
  write_rows<T>(source, mutable_data<T>(out), rows, width);
}
template <class T, class Source>
void run(const Source& source, const Quantised& out, int64_t rows, int64_t width) {
  quantise_rows<T>(
      source, mutable_data<int8_t>(out.q), mutable_data<float>(out.scale), rows, width);
}

inline void check_same_shape(const Tensor& a, const Tensor& b, const char* names) {
  STD_TORCH_CHECK(
      std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(), b.sizes().end()), names,
      " have one shape.");
}

inline int64_t norm_width(const Tensor& x, const Tensor& weight) {
  const int64_t width = x.size(-1);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == width, "A norm's weight is as wide as its input, ",
      width, ".");
  return width;
}

// An op's name, and its kernel as the dispatcher calls it.
struct Entry {
  const char* name;
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

using Entries = std::vector<Entry>;

}  // namespace compilepass

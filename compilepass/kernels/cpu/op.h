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

#include "quantise.h"
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

// The results of a quantisation (those that it has), and how rows become them.
struct Quantised {
  Tensor q;
  std::optional<Tensor> scale, zero_point;
  Quantising to;
  std::tuple<Sink<float>, Sink<BFloat16>, Sink<Float16>> sinks;

  Quantised(const Tensor& like, int64_t width, ScalarType dtype, decltype(sinks) sinks)
      : q(empty(like, width, dtype)),
        to{static_cast<int8_t*>(q.mutable_data_ptr()), nullptr, nullptr, width},
        sinks(sinks) {}

  Quantised& with_scales(const Tensor& like, int64_t a_row = 1) {
    scale = empty(like, a_row, ScalarType::Float);
    to.scales = mutable_data<float>(*scale);
    return *this;
  }
  Quantised& with_zero_points(const Tensor& like) {
    zero_point = empty(like, 1, ScalarType::Int);
    to.zero_points = mutable_data<int32_t>(*zero_point);
    return *this;
  }
};

// A quantisation: its part of the names of fused ops, what it is given beside the rows, and whether
// it finds scales, and zero points, of its own.

struct DynamicInt8 {
  static constexpr const char* kName = "dynamic_int8";
  static constexpr bool kFindsScales = true;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<>;
  static bool takes() { return true; }
  static Quantised of(const Tensor& like, int64_t width) {
    return Quantised(
               like, width, ScalarType::Char,
               {dynamic_int8<float>, dynamic_int8<BFloat16>, dynamic_int8<Float16>})
        .with_scales(like);
  }
};

struct AsymmetricInt8 {
  static constexpr const char* kName = "asymmetric_int8";
  static constexpr bool kFindsScales = true;
  static constexpr bool kFindsZeroPoints = true;
  using Settings = std::tuple<>;
  static bool takes() { return true; }
  static Quantised of(const Tensor& like, int64_t width) {
    return Quantised(
               like, width, ScalarType::Char,
               {asymmetric_int8<float>, asymmetric_int8<BFloat16>, asymmetric_int8<Float16>})
        .with_scales(like)
        .with_zero_points(like);
  }
};

struct DynamicFp8 {
  static constexpr const char* kName = "dynamic_fp8";
  static constexpr bool kFindsScales = true;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<>;
  static bool takes() { return true; }
  static Quantised of(const Tensor& like, int64_t width) {
    return Quantised(
               like, width, ScalarType::Float8_e4m3fn,
               {dynamic_fp8<float>, dynamic_fp8<BFloat16>, dynamic_fp8<Float16>})
        .with_scales(like);
  }
};

struct GroupFp8 {
  static constexpr const char* kName = "group_fp8";
  static constexpr bool kFindsScales = true;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<int64_t>;
  static bool takes(int64_t) { return true; }
  static Quantised of(const Tensor& like, int64_t width, int64_t group) {
    STD_TORCH_CHECK(
        group > 0 && width % group == 0, "A row of ", width, " is not whole groups of ", group, ".");
    Quantised out(
        like, width, ScalarType::Float8_e4m3fn,
        {group_fp8<float>, group_fp8<BFloat16>, group_fp8<Float16>});
    out.to.group = group;
    return out.with_scales(like, width / group);
  }
};

inline bool is_number(const Tensor& t, ScalarType dtype) {
  return t.is_cpu() && t.scalar_type() == dtype && t.numel() == 1 && !needs_grad(t);
}

struct StaticInt8 {
  static constexpr const char* kName = "static_int8";
  static constexpr bool kFindsScales = false;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<const Tensor&>;
  static bool takes(const Tensor& scale) { return is_number(scale, ScalarType::Float); }
  static Quantised of(const Tensor& like, int64_t width, const Tensor& scale) {
    Quantised out(
        like, width, ScalarType::Char,
        {static_int8<float>, static_int8<BFloat16>, static_int8<Float16>});
    out.to.scale = *data<float>(scale);
    return out;
  }
};

// Zero points beyond this leave no digits to a float32.
constexpr int32_t kFarthest = 1 << 20;

struct StaticAsymmetricInt8 {
  static constexpr const char* kName = "static_asymmetric_int8";
  static constexpr bool kFindsScales = false;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<const Tensor&, const Tensor&>;
  static bool takes(const Tensor& scale, const Tensor& zero_point) {
    return StaticInt8::takes(scale) && is_number(zero_point, ScalarType::Int) &&
        std::abs(*data<int32_t>(zero_point)) <= kFarthest;
  }
  static Quantised of(
      const Tensor& like, int64_t width, const Tensor& scale, const Tensor& zero_point) {
    Quantised out = StaticInt8::of(like, width, scale);
    out.to.zero_point = *data<int32_t>(zero_point);
    return out;
  }
};

struct StaticFp8 {
  static constexpr const char* kName = "static_fp8";
  static constexpr bool kFindsScales = false;
  static constexpr bool kFindsZeroPoints = false;
  using Settings = std::tuple<const Tensor&>;
  static bool takes(const Tensor& scale) { return is_number(scale, ScalarType::Float); }
  static Quantised of(const Tensor& like, int64_t width, const Tensor& scale) {
    Quantised out(
        like, width, ScalarType::Float8_e4m3fn,
        {static_fp8<float>, static_fp8<BFloat16>, static_fp8<Float16>});
    out.to.scale = *data<float>(scale);
    return out;
  }
};

// What an op returns that quantises with Q: Q's results, then the source's others.
template <class Q, class... More>
auto results(const Quantised& out, const More&... more) {
  if constexpr (Q::kFindsZeroPoints) {
    return std::tuple<Tensor, Tensor, Tensor, More...>{out.q, *out.scale, *out.zero_point, more...};
  } else if constexpr (Q::kFindsScales) {
    return std::tuple<Tensor, Tensor, More...>{out.q, *out.scale, more...};
  } else if constexpr (sizeof...(More) > 0) {
    return std::tuple<Tensor, More...>{out.q, more...};
  } else {
    return out.q;
  }
}
template <class Q, class... More>
using ResultsOf =
    decltype(results<Q>(std::declval<const Quantised&>(), std::declval<const More&>()...));

template <class Q>
std::string fused_name(const char* source) {
  return std::string(source) + "_" + Q::kName + "_quant";
}

template <class Q, class Result, class... Args>
Result call_fused(const char* source, const Args&... args) {
  return call<Result>(("compilepass_native::" + fused_name<Q>(source)).c_str(), args...);
}

// The two sinks of a row source, by whether the op quantises.
template <class T, class Source>
void run(const Source& source, const Tensor& out, int64_t rows, int64_t width) {
  write_rows<T>(source, mutable_data<T>(out), rows, width);
}
template <class T, class Source>
void run(const Source& source, const Quantised& out, int64_t rows, int64_t) {
  quantise_rows<T>(source, out.to, std::get<Sink<T>>(out.sinks), rows);
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
  std::string name;
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

using Entries = std::vector<Entry>;

// Entries and those that Fused<Q> has, for every quantisation Q.
template <template <class, class> class Fused>
Entries with_quantised(Entries entries) {
  const auto add = [&]<class Q>(Q) {
    for (const Entry& entry : Fused<Q, typename Q::Settings>::entries()) entries.push_back(entry);
  };
  add(DynamicInt8{}), add(AsymmetricInt8{}), add(StaticInt8{}), add(StaticAsymmetricInt8{});
  add(DynamicFp8{}), add(StaticFp8{}), add(GroupFp8{});
  return entries;
}

}  // namespace compilepass

// The CPU kernels as torch ops, on PyTorch's stable ABI: one build serves torch 2.11 and later.
//
// A call that a kernel does not take (another dtype, mixed dtypes, a gradient to record) goes to
// the op of the same name in `compilepass_native`, which the Python side defines.
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "activations.h"
#include "matmul.h"
#include "rotary.h"
#include "rows.h"

namespace compilepass {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

template <class Result>
struct Unpack {
  static Result of(StableIValue* stack) { return to<Result>(stack[0]); }
};
template <class... Results>
struct Unpack<std::tuple<Results...>> {
  static std::tuple<Results...> of(StableIValue* stack) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::tuple<Results...>{to<Results>(stack[I])...};
    }(std::index_sequence_for<Results...>{});
  }
};

constexpr size_t kMostValues = 6;  // arguments or results of an op

template <class Result, class... Args>
Result call(const char* op, const Args&... args) {
  std::array<StableIValue, kMostValues> stack{from(args)...};
  const auto failed = torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION);
  STD_TORCH_CHECK(!failed, op, " failed");
  return Unpack<Result>::of(stack.data());
}

// The stable ABI does not tell requires_grad; a view of the tensor does, by having a history.
bool requires_grad(const Tensor& t) {
  return !call<bool>("aten::is_leaf", t) ||
      !call<bool>("aten::is_leaf", call<Tensor>("aten::alias", t));
}

template <class... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return aoti_torch_grad_mode_is_enabled() && (requires_grad(tensors) || ...);
}

bool is_storage(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

bool is_matrix(const Tensor& t, ScalarType dtype) {
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

Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// A new contiguous tensor, shaped like `like` but for the last dim.
Tensor empty(const Tensor& like, int64_t width, ScalarType dtype) {
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

void check_same_shape(const Tensor& a, const Tensor& b, const char* names) {
  STD_TORCH_CHECK(
      std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(), b.sizes().end()), names,
      " have one shape.");
}

int64_t norm_width(const Tensor& x, const Tensor& weight) {
  const int64_t width = x.size(-1);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == width, "A norm's weight is as wide as its input, ",
      width, ".");
  return width;
}

// Calls body with what a norm's variant does with its weight.
template <class T, class Body>
void with_weight(const std::string& variant, const T* weight, const Body& body) {
  if (variant == "llama") return body(Weight<T, RoundedFirst<T>>{weight, {}});
  const float offset = variant == "gemma" ? 1.0f : 0.0f;
  STD_TORCH_CHECK(
      variant == "gemma" || variant == "torch", "variant is 'llama', 'torch' or 'gemma', not '",
      variant, "'.");
  body(Weight<T, RoundedLast>{weight, {offset}});
}

template <class Out>
void norm(
    const Tensor& x, const Tensor& weight, double eps, const std::string& variant,
    const Out& out) {
  const int64_t width = norm_width(x, weight);
  const Tensor rows = dense(x), weights = dense(weight);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    with_weight(variant, data<T>(weights), [&]<class Apply>(const Weight<T, Apply>& weight) {
      const Norm<T, Apply> source{data<T>(rows), weight, static_cast<float>(eps), width};
      run<T>(source, out, x.numel() / width, width);
    });
  });
}

template <class Out>
void add_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    const std::string& variant, const Out& out, const Tensor& total) {
  const int64_t width = norm_width(x, weight);
  check_same_shape(x, residual, "x and residual");
  const Tensor rows = dense(x), residuals = dense(residual), weights = dense(weight);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    with_weight(variant, data<T>(weights), [&]<class Apply>(const Weight<T, Apply>& weight) {
      const AddNorm<T, Apply> source{
          data<T>(rows), data<T>(residuals), mutable_data<T>(total), weight,
          static_cast<float>(eps), width};
      run<T>(source, out, x.numel() / width, width);
    });
  });
}

int64_t half(const Tensor& x) {
  STD_TORCH_CHECK(x.size(-1) % 2 == 0, "The last dim of x holds gate and value, one size each.");
  return x.size(-1) / 2;
}

// A tensor with rows of adjacent elements at equal distances: the tensor itself where it can be.
struct SpacedRows {
  Tensor tensor;
  int64_t stride;
};
SpacedRows spaced(const Tensor& t) {
  const int64_t dims = t.dim();
  bool even = dims > 1 && t.stride(dims - 1) == 1;
  for (int64_t d = 1; d < dims - 1; ++d) {
    even = even && t.stride(d - 1) == t.stride(d) * t.size(d);
  }
  if (even) return {t, t.stride(dims - 2)};
  return {dense(t), t.size(-1)};
}

template <class Gate, class Out>
void gated_halves(const Tensor& x, const Out& out) {
  const int64_t width = half(x);
  const Tensor rows = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const T* start = data<T>(rows);
    const Gated<T, Gate> source{{start, 2 * width}, {start + width, 2 * width}};
    run<T>(source, out, x.numel() / (2 * width), width);
  });
}

template <class Gate, class Out>
void gated(const Tensor& gate, const Tensor& up, const Out& out) {
  check_same_shape(gate, up, "gate and up");
  const int64_t width = gate.size(-1);
  const SpacedRows gates = spaced(gate), ups = spaced(up);
  with_storage(gate.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const Gated<T, Gate> source{
        {data<T>(gates.tensor), gates.stride}, {data<T>(ups.tensor), ups.stride}};
    run<T>(source, out, gate.numel() / width, width);
  });
}

// Calls body with the function that a GELU's name stands for.
template <class Body>
void with_gelu(const std::string& approximate, const Body& body) {
  STD_TORCH_CHECK(
      approximate == "none" || approximate == "tanh", "approximate is 'none' or 'tanh', not '",
      approximate, "'.");
  approximate == "tanh" ? body(GeluTanh{}) : body(GeluErf{});
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, weight)) {
    return call<Tensor>("compilepass_native::rms_norm", x, weight, eps, variant);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  norm(x, weight, eps, variant, out);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_dynamic_int8_quant(
    const Tensor& x, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, weight)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rms_norm_dynamic_int8_quant", x, weight, eps, variant);
  }
  const Quantised out(x, x.size(-1));
  norm(x, weight, eps, variant, out);
  return {out.q, out.scale};
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, residual, weight)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::fused_add_rms_norm", x, residual, weight, eps, variant);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  const Tensor total = empty(x, x.size(-1), x.scalar_type());
  add_norm(x, residual, weight, eps, variant, out, total);
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_dynamic_int8_quant(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, residual, weight)) {
    return call<std::tuple<Tensor, Tensor, Tensor>>(
        "compilepass_native::fused_add_rms_norm_dynamic_int8_quant", x, residual, weight, eps, variant);
  }
  const Quantised out(x, x.size(-1));
  const Tensor total = empty(x, x.size(-1), x.scalar_type());
  add_norm(x, residual, weight, eps, variant, out, total);
  return {out.q, out.scale, total};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  if (!takes(gate, up)) return call<Tensor>("compilepass_native::silu_mul", gate, up);
  const Tensor out = empty(gate, gate.size(-1), gate.scalar_type());
  gated<Silu>(gate, up, out);
  return out;
}

std::tuple<Tensor, Tensor> silu_mul_dynamic_int8_quant(const Tensor& gate, const Tensor& up) {
  if (!takes(gate, up)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::silu_mul_dynamic_int8_quant", gate, up);
  }
  const Quantised out(gate, gate.size(-1));
  gated<Silu>(gate, up, out);
  return {out.q, out.scale};
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, std::string approximate) {
  if (!takes(gate, up)) {
    return call<Tensor>("compilepass_native::gelu_mul", gate, up, approximate);
  }
  const Tensor out = empty(gate, gate.size(-1), gate.scalar_type());
  with_gelu(approximate, [&]<class Gelu>(Gelu) { gated<Gelu>(gate, up, out); });
  return out;
}

Tensor silu_and_mul(const Tensor& x) {
  if (!takes(x)) return call<Tensor>("compilepass_native::silu_and_mul", x);
  const Tensor out = empty(x, half(x), x.scalar_type());
  gated_halves<Silu>(x, out);
  return out;
}

std::tuple<Tensor, Tensor> silu_and_mul_dynamic_int8_quant(const Tensor& x) {
  if (!takes(x)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::silu_and_mul_dynamic_int8_quant", x);
  }
  const Quantised out(x, half(x));
  gated_halves<Silu>(x, out);
  return {out.q, out.scale};
}

Tensor gelu_and_mul(const Tensor& x, std::string approximate) {
  if (!takes(x)) return call<Tensor>("compilepass_native::gelu_and_mul", x, approximate);
  const Tensor out = empty(x, half(x), x.scalar_type());
  with_gelu(approximate, [&]<class Gelu>(Gelu) { gated_halves<Gelu>(x, out); });
  return out;
}

std::tuple<Tensor, Tensor> quant_int8(const Tensor& x) {
  if (!takes(x)) return call<std::tuple<Tensor, Tensor>>("compilepass_native::quant_int8", x);
  const int64_t width = x.size(-1);
  const Quantised out(x, width);
  const Tensor rows = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    run<T>(Rows<T>{data<T>(rows), width}, out, x.numel() / width, width);
  });
  return {out.q, out.scale};
}

// The tensor itself where the elements of a row are adjacent.
Tensor with_dense_rows(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : dense(t);
}

// The strides of a table along the leading dims of x: 0 where it has one row for all of them.
// `skipped` dims of x, the last of the leading ones, are not among the table's.
std::vector<int64_t> table_strides(const Tensor& table, const Tensor& x, int64_t skipped) {
  const int64_t leading = x.dim() - 1 - skipped, own = table.dim() - 1;
  STD_TORCH_CHECK(own <= leading, "cos and sin have no more dimensions than x.");
  std::vector<int64_t> strides(x.dim() - 1, 0);
  for (int64_t d = 0; d < own; ++d) {
    const int64_t at = leading - own + d, size = table.size(d);
    STD_TORCH_CHECK(size == 1 || size == x.size(at), "cos and sin broadcast against x.");
    strides[at] = size == 1 ? 0 : table.stride(d);
  }
  return strides;
}

Tensor rotated(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t skipped, bool interleaved,
    bool per_pair, bool wide) {
  STD_TORCH_CHECK(
      cos.dim() > 0 && sin.dim() > 0 && cos.size(-1) == sin.size(-1), "cos and sin are equally wide.");
  const int64_t width = x.size(-1), turned = cos.size(-1) * (per_pair ? 2 : 1);
  STD_TORCH_CHECK(
      turned % 2 == 0 && turned <= width,
      "cos and sin hold a value for what is rotated of a row of ", width, " elements.");
  const Tensor out = empty(x, width, x.scalar_type());
  const Tensor rows = with_dense_rows(x), c = with_dense_rows(cos), s = with_dense_rows(sin);
  const auto sizes = x.sizes(), strides = rows.strides();
  Lead lead{{sizes.begin(), sizes.end() - 1}, {}};
  lead.strides = {
      std::vector<int64_t>(strides.begin(), strides.end() - 1), table_strides(c, x, skipped),
      table_strides(s, x, skipped)};
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const Rotation<T> rotation{
        data<T>(rows), data<T>(c), data<T>(s), mutable_data<T>(out), width, turned};
    rotate_rows(rotation, lead, x.numel() / width, interleaved, per_pair, wide);
  });
  return out;
}

Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool per_pair,
    bool wide) {
  if (!takes(x, cos, sin)) {
    return call<Tensor>("compilepass_native::rotate", x, cos, sin, interleaved, per_pair, wide);
  }
  return rotated(x, cos, sin, 0, interleaved, per_pair, wide);
}

std::tuple<Tensor, Tensor> rotary_embedding(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const bool taken = takes(q, k) && q.dim() > 1 && k.dim() > 1 && cos.is_cpu() && sin.is_cpu() &&
      is_storage(cos.scalar_type()) && is_storage(sin.scalar_type()) && is_matrix(k, k.scalar_type()) &&
      !needs_grad(cos, sin);
  if (!taken) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rotary_embedding", q, k, cos, sin, interleaved);
  }
  const ScalarType dtype = q.scalar_type();
  const Tensor c = cos.scalar_type() == dtype ? cos : torch::stable::to(cos, dtype);
  const Tensor s = sin.scalar_type() == dtype ? sin : torch::stable::to(sin, dtype);
  return {
      rotated(q, c, s, 1, interleaved, true, false), rotated(k, c, s, 1, interleaved, true, false)};
}

constexpr int64_t kWidestExact = 65536;  // 255 * 128 * width fits an int32

Tensor int8_linear(
    const Tensor& xq, const Tensor& xscale, const Tensor& wq, const Tensor& wscale,
    std::optional<Tensor> bias, ScalarType out_dtype) {
  const bool taken = is_matrix(xq, ScalarType::Char) && is_matrix(wq, ScalarType::Char) &&
      is_matrix(xscale, ScalarType::Float) && is_matrix(wscale, ScalarType::Float) &&
      is_storage(out_dtype) && xq.size(-1) <= kWidestExact && !needs_grad(xscale, wscale) &&
      (!bias || (bias->is_cpu() && !needs_grad(*bias)));
  if (!taken) {
    return call<Tensor>(
        "compilepass_native::int8_linear", xq, xscale, wq, wscale, bias, out_dtype);
  }
  const int64_t width = xq.size(-1), rows = xq.numel() / width, columns = wq.size(0);
  STD_TORCH_CHECK(
      wq.dim() == 2 && wq.size(1) == width, "xq and wq are equally wide, not ", width, " and ",
      wq.size(-1), ".");
  STD_TORCH_CHECK(
      xscale.numel() == rows && wscale.numel() == columns && (!bias || bias->numel() == columns),
      "xscale holds a value a row of xq, wscale and bias one a row of wq.");
  const Tensor out = empty(xq, columns, out_dtype);
  const Tensor x = dense(xq), xscales = dense(xscale), w = dense(wq), wscales = dense(wscale);
  std::optional<Tensor> biases;
  if (bias) biases = dense(torch::stable::to(*bias, ScalarType::Float));
  const Int8Linear operands{
      data<int8_t>(x), data<float>(xscales), data<int8_t>(w), data<float>(wscales),
      biases ? data<float>(*biases) : nullptr, rows, width, columns};
  with_storage(out_dtype, [&](auto storage) {
    using T = decltype(storage);
    int8_linear(operands, mutable_data<T>(out));
  });
  return out;
}

struct Entry {
  const char* name;
  void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

const Entry kEntries[] = {
    {"fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm)},
    {"fused_add_rms_norm_dynamic_int8_quant", TORCH_BOX(&fused_add_rms_norm_dynamic_int8_quant)},
    {"gelu_and_mul", TORCH_BOX(&gelu_and_mul)},
    {"gelu_mul", TORCH_BOX(&gelu_mul)},
    {"int8_linear", TORCH_BOX(&int8_linear)},
    {"quant_int8", TORCH_BOX(&quant_int8)},
    {"rms_norm", TORCH_BOX(&rms_norm)},
    {"rms_norm_dynamic_int8_quant", TORCH_BOX(&rms_norm_dynamic_int8_quant)},
    {"rotary_embedding", TORCH_BOX(&rotary_embedding)},
    {"rotate", TORCH_BOX(&rotate)},
    {"silu_and_mul", TORCH_BOX(&silu_and_mul)},
    {"silu_and_mul_dynamic_int8_quant", TORCH_BOX(&silu_and_mul_dynamic_int8_quant)},
    {"silu_mul", TORCH_BOX(&silu_mul)},
    {"silu_mul_dynamic_int8_quant", TORCH_BOX(&silu_mul_dynamic_int8_quant)},
};

}  // namespace
}  // namespace compilepass

// Puts the kernel of that name at the op's CPU dispatch key, for the life of the process; returns 0
// when done. Op by op, so that a provider of higher priority can be there instead.
extern "C" int compilepass_register(const char* name) {
  for (const auto& entry : compilepass::kEntries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_impl("compilepass", "CPU", __FILE__, __LINE__, &library)) return 1;
    return torch_library_impl(library, name, entry.boxed, TORCH_ABI_VERSION);
  }
  return 1;
}

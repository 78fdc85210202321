// The ops of gated activations.
#include "activations.h"
#include "op.h"

namespace compilepass {
namespace {

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

}  // namespace

Entries activations_entries() {
  return {
      {"gelu_and_mul", TORCH_BOX(&gelu_and_mul)},
      {"gelu_mul", TORCH_BOX(&gelu_mul)},
      {"silu_and_mul", TORCH_BOX(&silu_and_mul)},
      {"silu_and_mul_dynamic_int8_quant", TORCH_BOX(&silu_and_mul_dynamic_int8_quant)},
      {"silu_mul", TORCH_BOX(&silu_mul)},
      {"silu_mul_dynamic_int8_quant", TORCH_BOX(&silu_mul_dynamic_int8_quant)},
  };
}

}  // namespace compilepass

// The ops of activations, gated and not.
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

template <class Out, class Activation>
void gated_halves(
    const Tensor& x, const Out& out, Activation activation, bool gate_is_second = false) {
  const int64_t width = half(x);
  const Tensor rows = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const T* start = data<T>(rows);
    const Spaced<T> first{start, 2 * width}, second{start + width, 2 * width};
    const Gated<T, Activation> source{
        gate_is_second ? second : first, gate_is_second ? first : second, activation};
    run<T>(source, out, x.numel() / (2 * width), width);
  });
}

template <class Out, class Activation>
void gated(const Tensor& gate, const Tensor& up, const Out& out, Activation activation) {
  check_same_shape(gate, up, "gate and up");
  const int64_t width = gate.size(-1);
  const SpacedRows gates = spaced(gate), ups = spaced(up);
  with_storage(gate.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const Gated<T, Activation> source{
        {data<T>(gates.tensor), gates.stride}, {data<T>(ups.tensor), ups.stride}, activation};
    run<T>(source, out, gate.numel() / width, width);
  });
}

template <class Out>
void swigluoai(const Tensor& x, const Out& out, double alpha, double limit) {
  const int64_t width = half(x);
  const Tensor rows = dense(x);
  const ClampedSwiglu gate{static_cast<float>(alpha), static_cast<float>(limit)};
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const GatedNeighbours<T, ClampedSwiglu> source{data<T>(rows), width, gate};
    run<T>(source, out, x.numel() / (2 * width), width);
  });
}

template <class Function>
Tensor elementwise(const Tensor& x, Function function) {
  const Tensor out = empty(x, x.size(-1), x.scalar_type()), from = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    map(data<T>(from), mutable_data<T>(out), x.numel(), function);
  });
  return out;
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
  gated(gate, up, out, Silu{});
  return out;
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, std::string approximate) {
  if (!takes(gate, up)) {
    return call<Tensor>("compilepass_native::gelu_mul", gate, up, approximate);
  }
  const Tensor out = empty(gate, gate.size(-1), gate.scalar_type());
  with_gelu(approximate, [&](auto gelu) { gated(gate, up, out, gelu); });
  return out;
}

Tensor silu_and_mul(const Tensor& x) {
  if (!takes(x)) return call<Tensor>("compilepass_native::silu_and_mul", x);
  const Tensor out = empty(x, half(x), x.scalar_type());
  gated_halves(x, out, Silu{});
  return out;
}

Tensor gelu_and_mul(const Tensor& x, std::string approximate) {
  if (!takes(x)) return call<Tensor>("compilepass_native::gelu_and_mul", x, approximate);
  const Tensor out = empty(x, half(x), x.scalar_type());
  with_gelu(approximate, [&](auto gelu) { gated_halves(x, out, gelu); });
  return out;
}

Tensor mul_and_silu(const Tensor& x) {
  if (!takes(x)) return call<Tensor>("compilepass_native::mul_and_silu", x);
  const Tensor out = empty(x, half(x), x.scalar_type());
  gated_halves(x, out, Silu{}, true);
  return out;
}

Tensor fatrelu_and_mul(const Tensor& x, double threshold) {
  if (!takes(x)) return call<Tensor>("compilepass_native::fatrelu_and_mul", x, threshold);
  const Tensor out = empty(x, half(x), x.scalar_type());
  gated_halves(x, out, FatRelu{static_cast<float>(threshold)});
  return out;
}

Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit) {
  if (!takes(x)) return call<Tensor>("compilepass_native::swigluoai_and_mul", x, alpha, limit);
  const Tensor out = empty(x, half(x), x.scalar_type());
  swigluoai(x, out, alpha, limit);
  return out;
}

Tensor gelu_new(const Tensor& x) {
  return takes(x) ? elementwise(x, GeluTanh{}) : call<Tensor>("compilepass_native::gelu_new", x);
}

Tensor gelu_fast(const Tensor& x) {
  return takes(x) ? elementwise(x, GeluTanh{}) : call<Tensor>("compilepass_native::gelu_fast", x);
}

Tensor quick_gelu(const Tensor& x) {
  return takes(x) ? elementwise(x, QuickGelu{}) : call<Tensor>("compilepass_native::quick_gelu", x);
}

Tensor relu2(const Tensor& x) {
  return takes(x) ? elementwise(x, SquaredRelu{}) : call<Tensor>("compilepass_native::relu2", x);
}

// The gates with the quantisation Q of their result.
template <class Q, class Settings>
struct QuantisedGates;
template <class Q, class... S>
struct QuantisedGates<Q, std::tuple<S...>> {
  using Results = ResultsOf<Q>;

  static Results silu_mul(const Tensor& gate, const Tensor& up, S... settings) {
    if (!takes(gate, up) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("silu_mul", gate, up, settings...);
    }
    const Quantised out = Q::of(gate, gate.size(-1), settings...);
    gated(gate, up, out, Silu{});
    return results<Q>(out);
  }

  static Results silu_and_mul(const Tensor& x, S... settings) {
    if (!takes(x) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("silu_and_mul", x, settings...);
    }
    const Quantised out = Q::of(x, half(x), settings...);
    gated_halves(x, out, Silu{});
    return results<Q>(out);
  }

  static Results mul_and_silu(const Tensor& x, S... settings) {
    if (!takes(x) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("mul_and_silu", x, settings...);
    }
    const Quantised out = Q::of(x, half(x), settings...);
    gated_halves(x, out, Silu{}, true);
    return results<Q>(out);
  }

  static Results fatrelu_and_mul(const Tensor& x, S... settings, double threshold) {
    if (!takes(x) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("fatrelu_and_mul", x, settings..., threshold);
    }
    const Quantised out = Q::of(x, half(x), settings...);
    gated_halves(x, out, FatRelu{static_cast<float>(threshold)});
    return results<Q>(out);
  }

  static Results swigluoai_and_mul(const Tensor& x, S... settings, double alpha, double limit) {
    if (!takes(x) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("swigluoai_and_mul", x, settings..., alpha, limit);
    }
    const Quantised out = Q::of(x, half(x), settings...);
    swigluoai(x, out, alpha, limit);
    return results<Q>(out);
  }

  static Results gelu_mul(
      const Tensor& gate, const Tensor& up, S... settings, std::string approximate) {
    if (!takes(gate, up) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("gelu_mul", gate, up, settings..., approximate);
    }
    const Quantised out = Q::of(gate, gate.size(-1), settings...);
    with_gelu(approximate, [&](auto gelu) { gated(gate, up, out, gelu); });
    return results<Q>(out);
  }

  static Results gelu_and_mul(const Tensor& x, S... settings, std::string approximate) {
    if (!takes(x) || !Q::takes(settings...)) {
      return call_fused<Q, Results>("gelu_and_mul", x, settings..., approximate);
    }
    const Quantised out = Q::of(x, half(x), settings...);
    with_gelu(approximate, [&](auto gelu) { gated_halves(x, out, gelu); });
    return results<Q>(out);
  }

  static Entries entries() {
    return {
        {fused_name<Q>("silu_mul"), TORCH_BOX(&QuantisedGates::silu_mul)},
        {fused_name<Q>("silu_and_mul"), TORCH_BOX(&QuantisedGates::silu_and_mul)},
        {fused_name<Q>("mul_and_silu"), TORCH_BOX(&QuantisedGates::mul_and_silu)},
        {fused_name<Q>("fatrelu_and_mul"), TORCH_BOX(&QuantisedGates::fatrelu_and_mul)},
        {fused_name<Q>("swigluoai_and_mul"), TORCH_BOX(&QuantisedGates::swigluoai_and_mul)},
        {fused_name<Q>("gelu_mul"), TORCH_BOX(&QuantisedGates::gelu_mul)},
        {fused_name<Q>("gelu_and_mul"), TORCH_BOX(&QuantisedGates::gelu_and_mul)},
    };
  }
};

}  // namespace

Entries activations_entries() {
  return with_quantised<QuantisedGates>({
      {"fatrelu_and_mul", TORCH_BOX(&fatrelu_and_mul)},
      {"gelu_and_mul", TORCH_BOX(&gelu_and_mul)},
      {"gelu_fast", TORCH_BOX(&gelu_fast)},
      {"gelu_mul", TORCH_BOX(&gelu_mul)},
      {"gelu_new", TORCH_BOX(&gelu_new)},
      {"mul_and_silu", TORCH_BOX(&mul_and_silu)},
      {"quick_gelu", TORCH_BOX(&quick_gelu)},
      {"relu2", TORCH_BOX(&relu2)},
      {"silu_and_mul", TORCH_BOX(&silu_and_mul)},
      {"silu_mul", TORCH_BOX(&silu_mul)},
      {"swigluoai_and_mul", TORCH_BOX(&swigluoai_and_mul)},
  });
}

}  // namespace compilepass

// The ops of normalisation.
#include <optional>

#include "norms.h"
#include "op.h"

namespace compilepass {
namespace {

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

// A parameter of a layer norm, which may have none.
std::optional<Tensor> parameter(const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  norm_width(x, *t);
  return dense(*t);
}

bool takes_affine(
    const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  return takes(x, residual, weight.value_or(x), bias.value_or(x));
}

template <class Out>
void centred(
    const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    double eps, const Out& out) {
  const int64_t width = x.size(-1);
  const Tensor rows = dense(x);
  const auto weights = parameter(weight, x), biases = parameter(bias, x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const LayerNorm<T> source{
        data<T>(rows), {data_or_null<T>(weights), data_or_null<T>(biases)},
        static_cast<float>(eps), width};
    run<T>(source, out, x.numel() / width, width);
  });
}

template <class Out>
void add_centred(
    const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps, const Out& out, const Tensor& total) {
  check_same_shape(x, residual, "x and residual");
  const int64_t width = x.size(-1);
  const Tensor rows = dense(x), residuals = dense(residual);
  const auto weights = parameter(weight, x), biases = parameter(bias, x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const AddLayerNorm<T> source{
        data<T>(rows), data<T>(residuals), mutable_data<T>(total),
        {data_or_null<T>(weights), data_or_null<T>(biases)}, static_cast<float>(eps), width};
    run<T>(source, out, x.numel() / width, width);
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, weight)) {
    return call<Tensor>("compilepass_native::rms_norm", x, weight, eps, variant);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  norm(x, weight, eps, variant, out);
  return out;
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

// The norms with the quantisation Q of their result.
template <class Q, class Settings>
struct QuantisedNorms;
template <class Q, class... S>
struct QuantisedNorms<Q, std::tuple<S...>> {
  static ResultsOf<Q> rms_norm(
      const Tensor& x, const Tensor& weight, S... settings, double eps, std::string variant) {
    if (!takes(x, weight) || !Q::takes(settings...)) {
      return call_fused<Q, ResultsOf<Q>>("rms_norm", x, weight, settings..., eps, variant);
    }
    const Quantised out = Q::of(x, x.size(-1), settings...);
    norm(x, weight, eps, variant, out);
    return results<Q>(out);
  }

  static ResultsOf<Q, Tensor> fused_add_rms_norm(
      const Tensor& x, const Tensor& residual, const Tensor& weight, S... settings, double eps,
      std::string variant) {
    if (!takes(x, residual, weight) || !Q::takes(settings...)) {
      return call_fused<Q, ResultsOf<Q, Tensor>>(
          "fused_add_rms_norm", x, residual, weight, settings..., eps, variant);
    }
    const Quantised out = Q::of(x, x.size(-1), settings...);
    const Tensor total = empty(x, x.size(-1), x.scalar_type());
    add_norm(x, residual, weight, eps, variant, out, total);
    return results<Q>(out, total);
  }

  static ResultsOf<Q> layer_norm(
      const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, S... settings,
      double eps) {
    if (!takes_affine(x, x, weight, bias) || !Q::takes(settings...)) {
      return call_fused<Q, ResultsOf<Q>>("layer_norm", x, weight, bias, settings..., eps);
    }
    const Quantised out = Q::of(x, x.size(-1), settings...);
    centred(x, weight, bias, eps, out);
    return results<Q>(out);
  }

  static ResultsOf<Q, Tensor> fused_add_layer_norm(
      const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
      std::optional<Tensor> bias, S... settings, double eps) {
    if (!takes_affine(x, residual, weight, bias) || !Q::takes(settings...)) {
      return call_fused<Q, ResultsOf<Q, Tensor>>(
          "fused_add_layer_norm", x, residual, weight, bias, settings..., eps);
    }
    const Quantised out = Q::of(x, x.size(-1), settings...);
    const Tensor total = empty(x, x.size(-1), x.scalar_type());
    add_centred(x, residual, weight, bias, eps, out, total);
    return results<Q>(out, total);
  }

  static Entries entries() {
    return {
        {fused_name<Q>("layer_norm"), TORCH_BOX(&QuantisedNorms::layer_norm)},
        {fused_name<Q>("fused_add_layer_norm"), TORCH_BOX(&QuantisedNorms::fused_add_layer_norm)},
        {fused_name<Q>("rms_norm"), TORCH_BOX(&QuantisedNorms::rms_norm)},
        {fused_name<Q>("fused_add_rms_norm"), TORCH_BOX(&QuantisedNorms::fused_add_rms_norm)},
    };
  }
};

Tensor layer_norm(
    const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  if (!takes_affine(x, x, weight, bias)) {
    return call<Tensor>("compilepass_native::layer_norm", x, weight, bias, eps);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  centred(x, weight, bias, eps, out);
  return out;
}

std::tuple<Tensor, Tensor> fused_add_layer_norm(
    const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
    std::optional<Tensor> bias, double eps) {
  if (!takes_affine(x, residual, weight, bias)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::fused_add_layer_norm", x, residual, weight, bias, eps);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  const Tensor total = empty(x, x.size(-1), x.scalar_type());
  add_centred(x, residual, weight, bias, eps, out, total);
  return {out, total};
}

}  // namespace

Entries norms_entries() {
  return with_quantised<QuantisedNorms>({
      {"fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm)},
      {"fused_add_layer_norm", TORCH_BOX(&fused_add_layer_norm)},
      {"layer_norm", TORCH_BOX(&layer_norm)},
      {"rms_norm", TORCH_BOX(&rms_norm)},
  });
}

}  // namespace compilepass

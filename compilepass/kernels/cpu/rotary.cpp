// The ops of rotary position embedding.
#include "op.h"
#include "rotary.h"

namespace compilepass {
namespace {

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

// Calls body with the rows of x and of its tables (a Rotation, its Lead and the number of rows).
template <class Body>
Tensor with_rotation(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t skipped, bool per_pair,
    const Body& body) {
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
    body(rotation, lead, x.numel() / width);
  });
  return out;
}

Tensor rotated(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t skipped, bool interleaved,
    bool per_pair, bool wide) {
  return with_rotation(
      x, cos, sin, skipped, per_pair,
      [&](const auto& rotation, const Lead& lead, int64_t rows) {
        rotate_rows(rotation, lead, rows, interleaved, per_pair, wide);
      });
}

// The heads of x normed, then rotated.
Tensor norm_rotated(
    const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, int64_t skipped,
    float eps, bool interleaved, bool per_pair, const std::string& variant) {
  norm_width(x, weight);
  const Tensor weights = dense(weight);
  return with_rotation(
      x, cos, sin, skipped, per_pair,
      [&]<class T>(const Rotation<T>& rotation, const Lead& lead, int64_t rows) {
        with_weight(variant, data<T>(weights), [&](const auto& weight) {
          choose(interleaved, [&]<class Interleaved>(Interleaved) {
            choose(per_pair, [&]<class PerPair>(PerPair) {
              norm_rotate_rows<Interleaved::value, PerPair::value>(
                  rotation, weight, eps, lead, rows);
            });
          });
        });
      });
}

// Whether cos and sin can be the tables of heads that are taken.
bool takes_tables(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  return q.dim() > 1 && k.dim() > 1 && k.size(-1) > 0 && cos.is_cpu() && sin.is_cpu() &&
      is_storage(cos.scalar_type()) && is_storage(sin.scalar_type()) && !needs_grad(cos, sin);
}

Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
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
  if (!takes(q, k) || !takes_tables(q, k, cos, sin)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rotary_embedding", q, k, cos, sin, interleaved);
  }
  const Tensor c = as_dtype(cos, q.scalar_type()), s = as_dtype(sin, q.scalar_type());
  return {
      rotated(q, c, s, 1, interleaved, true, false), rotated(k, c, s, 1, interleaved, true, false)};
}

std::tuple<Tensor, Tensor> qk_norm_rope(
    const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
    const Tensor& cos, const Tensor& sin, double eps, bool interleaved, std::string variant) {
  if (!takes(q, k, q_weight, k_weight) || !takes_tables(q, k, cos, sin)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::qk_norm_rope", q, k, q_weight, k_weight, cos, sin, eps, interleaved,
        variant);
  }
  const Tensor c = as_dtype(cos, q.scalar_type()), s = as_dtype(sin, q.scalar_type());
  const float e = static_cast<float>(eps);
  return {
      norm_rotated(q, q_weight, c, s, 1, e, interleaved, true, variant),
      norm_rotated(k, k_weight, c, s, 1, e, interleaved, true, variant)};
}

Tensor rms_norm_rotate(
    const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
    std::string variant, bool interleaved, bool per_pair) {
  if (!takes(x, weight, cos, sin)) {
    return call<Tensor>(
        "compilepass_native::rms_norm_rotate", x, weight, cos, sin, eps, variant, interleaved,
        per_pair);
  }
  return norm_rotated(
      x, weight, cos, sin, 0, static_cast<float>(eps), interleaved, per_pair, variant);
}

}  // namespace

Entries rotary_entries() {
  return {
      {"qk_norm_rope", TORCH_BOX(&qk_norm_rope)},
      {"rms_norm_rotate", TORCH_BOX(&rms_norm_rotate)},
      {"rotary_embedding", TORCH_BOX(&rotary_embedding)},
      {"rotate", TORCH_BOX(&rotate)},
  };
}

}  // namespace compilepass

// The best tokens of rows of logits and their log-probabilities; `proposer/choices.py` calls it.

namespace {

constexpr int MAX_WIDTH = 64;

// Best first, ties by id. False if a logit is NaN or +inf, or if none is finite.
template <class T>
bool best_of_row(const T* row, int64_t vocab, float factor, int64_t width, int64_t* ids,
                 float* log_confidence) {
  float kept[MAX_WIDTH];
  std::fill(kept, kept + width, -INFINITY);
  std::fill(ids, ids + width, 0);
  int64_t count = 0;  // number kept
  Ints nan = {};
  for (int64_t first = 0; first < vocab; first += W) {
    const int64_t rest = std::min(int64_t(W), vocab - first);
    const Floats x = rest == W ? load(row + first) : load_some(row + first, rest);
    nan |= x != x;
    uint32_t lanes = count < width ? (1u << rest) - 1 : any(x > kept[width - 1]);
    if (!lanes) continue;
    float values[W];
    store(values, x);
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      const float value = values[lane];
      if (count == width && !(value > kept[width - 1])) continue;
      int64_t at = count < width ? count++ : width - 1;
      for (; at > 0 && value > kept[at - 1]; at--) kept[at] = kept[at - 1], ids[at] = ids[at - 1];
      kept[at] = value, ids[at] = first + lane;
    }
  }
  const float shift = kept[0] * factor;
  if (any(nan) || !std::isfinite(shift) || !(factor > 0)) return false;
  Floats sums = {};
  for (int64_t first = 0; first < vocab; first += W) {
    const int64_t rest = std::min(int64_t(W), vocab - first);
    const Floats x = rest == W ? load(row + first) : load_some(row + first, rest);
    sums += exponential(x * factor - shift);
  }
  float parts[W], sum = 0;
  store(parts, sums);
  for (float part : parts) sum += part;
  const float total = std::log(sum);
  for (int64_t i = 0; i < width; i++) log_confidence[i] = std::min(0.0f, kept[i] * factor - shift - total);
  return true;
}

template <class T>
bool best_of_rows(const T* logits, int64_t rows, int64_t vocab, int64_t stride,
                  const float* factors, int64_t num_factors, int64_t width, int64_t* ids,
                  float* log_confidence) {
  bool finite = true;
#pragma omp parallel for reduction(&& : finite) if (rows > 1)
  for (int64_t i = 0; i < rows; i++)
    finite = best_of_row(logits + i * stride, vocab, factors[i % num_factors], width,
                         ids + i * width, log_confidence + i * width) && finite;
  return finite;
}

}  // namespace

// logits [rows, vocab]; row i is multiplied by factors[i % num_factors]; ids and log_confidence
// [rows, width]. Returns 0 if the logits are not finite; the outputs are then undefined.
extern "C" int32_t best_choices(const void* logits, int32_t dtype, int64_t rows, int64_t vocab,
                                int64_t stride, const float* factors, int64_t num_factors,
                                int64_t width, int64_t* ids, float* log_confidence) {
  const auto run = [&](auto* typed) {
    return best_of_rows(typed, rows, vocab, stride, factors, num_factors, width, ids,
                        log_confidence);
  };
  if (dtype == 0) return run(static_cast<const float*>(logits));
  if (dtype == 1) return run(static_cast<const BFloat16*>(logits));
  return run(static_cast<const Float16*>(logits));
}

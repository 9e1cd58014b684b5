// Hydra heads, with a beam of `beam.cpp`; `proposer/hydra.py` calls it.

extern "C" {

struct Hydra {
  const Matrix* first;      // [levels]: skip connection, then layer: 2 * hidden rows
  const Matrix* layers;     // [levels, num_layers], residual
  const Matrix* lm_heads;   // [levels]
  Embedding embedding;
  const int64_t* token_map; // [vocab] ids of the target; null: the same ids
  const float* sharpness;   // [levels], factors on the logits
  int64_t hidden, num_layers, vocab;
  float soft_cap;           // 0: none
};
}

namespace {

// Hidden state and embeddings down to each node [nodes, (level + 2) * hidden] -> logits.
void score_nodes(const Hydra& hydra, int64_t level, const float* inputs, int64_t count,
                 std::vector<float>& logits) {
  static thread_local std::vector<float> both, x, y;
  const int64_t H = hydra.hidden;
  multiply(hydra.first[level], inputs, count, both);
  x.resize(count * H);
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < H; i += W) {
      const float* row = both.data() + r * 2 * H + i;
      store(x.data() + r * H + i, load(row) + silu(load(row + H)));
    }
  for (int64_t layer = 0; layer < hydra.num_layers; layer++) {
    multiply(hydra.layers[level * hydra.num_layers + layer], x.data(), count, y);
    for (int64_t i = 0; i < count * H; i += W)
      store(x.data() + i, load(x.data() + i) + silu(load(y.data() + i)));
  }
  multiply(hydra.lm_heads[level], x.data(), count, logits);
  if (hydra.soft_cap > 0)
    for (float& logit : logits) logit = hydra.soft_cap * std::tanh(logit / hydra.soft_cap);
}

}  // namespace

// states [batch, hidden]. Returns 0 if logits are not finite; the outputs are then undefined.
extern "C" int32_t hydra_trees(const Hydra* heads, const float* states, const Beam* beam) {
  const Hydra& hydra = *heads;
  const int64_t H = hydra.hidden;
  static thread_local std::vector<float> inputs, above, logits;  // [nodes, (level + 1) * H]
  above.assign(states, states + beam->batch * H);
  return grow(*beam, hydra.token_map, [&](int64_t level, const auto& expanded, Choices& found) {
    const int64_t count = expanded.size(), old = (level + 1) * H, width = old + H;
    inputs.resize(count * width);
    for (int64_t r = 0; r < count; r++) {
      float* row = inputs.data() + r * width;
      std::copy_n(above.data() + expanded[r].row * old, old, row);
      embed(hydra.embedding, expanded[r].token, H, row + old);
    }
    score_nodes(hydra, level, inputs.data(), count, logits);
    std::swap(inputs, above);
    return choose(*beam, level, expanded, logits.data(), hydra.vocab, hydra.lm_heads[level].rows,
                  hydra.sharpness[level], found);
  });
}

"""Adapter for vLLM's V2 model runner, which is used as it is: no method of it is overridden.

V2 is built from parts that can be replaced. What fills each of its seams here, and the assumption
of vLLM's own part, a *chain* of drafts, that it replaces:

    seam of vLLM                      filled by                   chain -> tree
    --------------------------------  --------------------------  ---------------------------------
    SpeculativeConfig                 config.TreeSpeculative-     drafts are tree nodes, parents
                                      Config                      first; a cut list is still a tree
    Worker.init_device                worker.MedusaWorker         installs the two below
    init_speculator (patched)         speculator.TreeSpeculator   the next drafts follow the last
                                                                  accepted *node*, not the last
                                                                  row that was not rejected
    AttentionBackendEnum              worker.attention            a node sees its ancestors only
    model.get_model_state_cls         state.TreeModelState
      prepare_attn                      worker.trees.Trees.begin  which rows are whose nodes
      prepare_inputs                    Trees.write_positions     RoPE by depth; slots stay by index
      custom_sampler                    sampler.TreeSampler       a token drawn at every node, and
                                                                  the walk down (sampler.dispatch)
      postprocess_state                 compaction                the accepted path's KV closes up

With an EAGLE drafter the speculator is eagle.EagleTreeSpeculator: its prefill takes the accepted
*path*, where vLLM's takes all rows that the target had, and its levels are trees' (`eagle_trees`).

A step, in V2's order: its own preparation puts node i into slot base + i (that much of a chain is
right for trees whose parents come first), then `prepare_attn`, `prepare_inputs`, the forward pass,
the sampler, vLLM's counters (they only ask *how many* drafts were accepted), `postprocess_state`
and `propose`. Everything stays on the device: nothing here waits for it, so that the next step can
be scheduled while this one runs (async scheduling).
"""

// A router's choice made again while the graph runs, and the router's own weights for it. The hook comes behind both: the few nodes
// that lead from the ids to the weights are added once more, with the new ids in their place.
#pragma once

#include "split-graph.h"

// p: gets the new ids and weights; backend: of the node that calls node->ops->choose_again
// false: p is as it was, as this router does not choose by its logits only (a bias for the choice, groups, ids by token)
bool spac_choose_again(llama_moe_hook_params & p, spac_split_node * node, ggml_backend_t backend);

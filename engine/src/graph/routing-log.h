// The routing log: which token used which experts, layer by layer, for whoever learns from that. A ring on the board, one
// row per token of a forward; of a prompt's batches only the last rows.
//
// Ids are read from the graph's own input: a batch's tokens may come in another order than they were given, and in pieces.
#pragma once

#include "board/board.h"

#include "llama-moe-hook.h"

#include <cstdint>

struct spac_routing_log {
    // outlived by the board, as are graphs with its node
    explicit spac_routing_log(spac_board & board);

    // whether somebody reads it; else it costs nothing: the graph has no node, and no rows begin
    bool is_asked() const { return board.is_asked_ahead(); }

    // to be called for the first layer of a graph whose ids will be added: a node that begins the graph's rows
    void add_node(const llama_moe_hook_params & p, ggml_backend_t backend);

    // while the graph runs

    int64_t n_tokens_counted = INT64_MAX; // of a graph, the first ones; the others have no id

    // tokens: [n_tokens], or NULL where the graph's input are embeddings; ends the rows before
    void begin(const ggml_tensor * tokens, int64_t n_tokens);
    // ids: [n_expert_used, n_tokens] of a layer; one that ran for only some of the tokens is left out
    void add(int il, const ggml_tensor * ids);
    // the rows are whole: readers see them from now on
    void end();

  private:
    uint16_t *  experts_of(int64_t i) const; // [n_layer, n_expert_used] of the i-th row in progress
    static void begin_with_tokens(ggml_tensor * dst, int ith, int nth, void * user_data);
    static void begin_without(ggml_tensor * dst, int ith, int nth, void * user_data);

    spac_board &     board;
    int32_t * const  ring_tokens;
    uint16_t * const ring_experts;

    int64_t  n_tokens = 0; // of the graph in progress; 0: none
    uint64_t first    = 0; // index of its first row
};

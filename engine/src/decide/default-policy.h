// What decides while no scheduler does: hold what is used most, load a few of the missing per forward.
#pragma once

#include <cstdint>
#include <vector>

struct spac_default_policy {
    spac_default_policy(uint32_t n_layer, uint32_t n_expert, std::vector<int32_t> layer_group, std::vector<int32_t> group_slots);

    // counts: cumulative activations [n_layer, n_expert]; fills utility, tau and load below
    void update(const uint32_t * counts, const uint8_t * residency);

    std::vector<uint8_t>  utility; // [n_layer, n_expert]
    std::vector<uint8_t>  tau;     // [n_layer]
    std::vector<uint32_t> load;    // keys il * n_expert + ie, most wanted first

  private:
    void set_utilities();
    void set_thresholds();
    void set_loads(const uint8_t * residency);

    const uint32_t             n_layer, n_expert;
    const std::vector<int32_t> layer_group; // -1: not split
    const std::vector<int32_t> group_slots;

    std::vector<float>    demand; // [n_layer, n_expert] moving average of the counts per forward
    std::vector<uint32_t> last;   // [n_layer, n_expert] counts at the last update
};

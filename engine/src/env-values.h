// Values of the environment's variables (env-attach.cpp), and of the options that stand for them: how each is read.
// All throw SPAC_STATUS_INVALID_ARGUMENT. name: the variable's or the option's, for the error.
#pragma once

#include "decide/draft-gate.h"
#include "spac.h"

#include <cstdint>
#include <string>

int32_t spac_read_n_tokens(const std::string & name, const std::string & text, int32_t max); // 1 to max
double  spac_read_max_kl(const std::string & name, const std::string & text);
int32_t spac_read_host_kernels(const std::string & name, const std::string & text); // spac_host_kernels
bool    spac_read_switch(const std::string & name, const std::string & text);

// the speeds of all devices, or of each
void spac_read_copy_speeds(const std::string & name, const std::string & text, spac_engine_params & params);

// the engine's own predictors
struct spac_predictors {
    int32_t          next_layer = 0; // MoE layers ahead that routers are asked; 0: none
    bool             draft_gate = false;
    spac_gate_limits limits;
};
spac_predictors spac_read_predictors(const std::string & name, const std::string & text);

/* For every CPU: what the compiler makes of vectors of four with the instructions that all of its kind have. */
#include "ops_template.h"

const bough_ops *bough_ops_plain(void) { return &OPS; }

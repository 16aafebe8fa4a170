"""``dot_general`` on TPUs: operands quantized in one read, and no transposed copies."""

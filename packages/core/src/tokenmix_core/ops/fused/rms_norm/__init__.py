"""Root-mean-square normalisation of rows, with what lies around it: a sum of two branches before, a SiLU gate."""

"""The kinds of normalization that a model can have; torch isn't imported here."""

LAYERNORM, RMSNORM, NONORM, BATCHNORM = NORM_KINDS = ("layernorm", "rmsnorm", "nonorm", "batchnorm")
ELEMENTWISE = (NONORM, BATCHNORM)  # a scale and a shift of each feature once the student is trained
MOBILEBERT = {"layer_norm": LAYERNORM, "no_norm": NONORM}  # its setting -> kind: both are of the stock class

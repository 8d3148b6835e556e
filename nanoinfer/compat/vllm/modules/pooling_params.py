from nanoinfer.features.embedding.pooling import PoolingParams

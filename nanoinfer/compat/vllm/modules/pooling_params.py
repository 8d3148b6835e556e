from nanoinfer.embedding.pooling import PoolingParams

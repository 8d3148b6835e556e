from nanoinfer.features.metrics.engine_metrics import Counter, Gauge, Histogram, Metric, Vector

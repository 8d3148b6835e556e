from nanoinfer.engine.metrics import Counter, Gauge, Histogram, Metric, Vector

from nanoinfer.outputs import Counter, Gauge, Histogram, Metric, Vector

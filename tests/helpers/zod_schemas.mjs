// Write zod_schemas.json: `npm install zod@4 && node zod_schemas.mjs > zod_schemas.json`. `refused` is the place that is refused.
import { z } from "zod";

const Address = z.object({ street: z.string(), zip: z.string().regex(/^\d{5}$/).optional() }).meta({ id: "Address" });
const Node = z.object({ value: z.number(), get next() { return Node.nullable(); } });
const Category = z.object({ name: z.string().min(1), get children() { return z.array(Category); } }).meta({ id: "Category" });
const Color = z.enum(["red", "green", "blue"]);

const schemas = {
  person: z.object({ name: z.string(), age: z.int().min(0).max(150), email: z.email(), address: Address }),
  links: z.object({ home: z.url(), web: z.httpUrl() }),
  identities: z.object({ a: z.uuid(), b: z.uuidv4(), c: z.guid() }),
  "short identities": z.object({ a: z.cuid(), b: z.cuid2(), c: z.ulid(), d: z.nanoid(), e: z.ksuid(), f: z.xid() }),
  encodings: z.object({ a: z.base64(), b: z.base64url(), c: z.hex(), d: z.hash("sha256") }),
  token: z.object({ token: z.jwt(), phone: z.e164() }),
  networks: z.object({ a: z.ipv4(), b: z.ipv6(), c: z.cidrv4(), d: z.mac() }),
  times: z.object({ day: z.iso.date(), time: z.iso.time(), at: z.iso.datetime(), here: z.iso.datetime({ offset: true }) }),
  file: z.object({ file: z.file(), name: z.string() }),
  texts: z.object({ a: z.string().startsWith("ab"), b: z.string().endsWith("z"), c: z.string().includes("q") }),
  cases: z.object({ a: z.string().lowercase(), b: z.string().uppercase(), c: z.string().trim(), d: z.string().length(4) }),
  record: z.object({ counts: z.record(z.string(), z.number()) }),
  "record of colors": z.object({ counts: z.record(Color, z.int()) }),
  "some colors": z.object({ counts: z.partialRecord(Color, Address) }),
  "record by uuid": z.object({ by: z.record(z.uuid(), z.boolean()) }),
  "record by number": z.record(z.number(), z.string()),
  json: z.object({ value: z.json() }),
  union: z.object({ a: z.union([z.string(), z.number(), z.null()]), b: z.array(z.union([Address, Color])) }),
  shapes: z.discriminatedUnion("type", [
    z.object({ type: z.literal("circle"), radius: z.number().positive() }),
    z.object({ type: z.literal("box"), width: z.number().min(1).max(9), height: z.number().multipleOf(0.5) }),
  ]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.boolean() })),
  tuples: z.object({ pair: z.tuple([z.string(), z.number()]), rest: z.tuple([z.boolean()], z.int()) }),
  lists: z.object({ a: z.array(z.string()).min(1).max(3), b: z.array(Color).nonempty() }),
  optional: z.object({ a: z.string().optional(), b: z.number().nullable(), c: z.string().default("x"), d: z.nullish(z.boolean()) }),
  literals: z.object({ a: z.literal(["x", "y", 3]), b: z.literal("only"), c: z.enum({ A: 1, B: 2 }), d: z.templateLiteral(["v", z.int()]) }),
  objects: z.object({ loose: z.looseObject({ a: z.string() }), strict: z.strictObject({ a: z.int32() }), rest: z.object({}).catchall(z.int()) }),
  node: Node,
  categories: z.object({ root: Category }),
  anything: z.object({ a: z.any(), b: z.unknown(), c: z.looseRecord(z.string().regex(/^x-/), z.string()) }),
  duration: z.object({ took: z.iso.duration() }),
  host: z.object({ servers: z.array(z.object({ name: z.hostname() }).meta({ id: "Server" })) }),
};
const refused = { duration: "json.properties.took", host: "json.$defs.Server.properties.name" };

const lines = Object.entries(schemas).map(
  ([name, schema]) => `  ${JSON.stringify(name)}: ${JSON.stringify({ schema: z.toJSONSchema(schema), refused: refused[name] })}`,
);
console.log(`{\n${lines.join(",\n")}\n}`);

// Holds custom resources to their CRDs' schemas: a JSON array on standard input, one line a fault
// on standard output. The packages are found from the working directory.
import { readFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const at = (name) => import(pathToFileURL(`${process.cwd()}/node_modules/${name}/index.js`).href)
const groups = {
  'monitoring.coreos.com/v1': '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1',
  'keda.sh/v1alpha1': '@kubernetes-models/keda/keda.sh/v1alpha1',
  'gateway.networking.k8s.io/v1': '@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1',
}
for (const object of JSON.parse(readFileSync(0, 'utf8'))) {
  const models = await at(groups[object.apiVersion])
  try {
    new models[object.kind](object).validate()
  } catch (error) {
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`)
  }
}

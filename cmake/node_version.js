// 1, if this Node.js can build the web page (20.19), else 0
const [major, minor] = process.versions.node.split(".").map(Number);
console.log(major > 20 || (major === 20 && minor >= 19) ? 1 : 0);
